"""The door, opened in this process."""

from tests.launch.running import door as door
from tests.launch.running import laboratory as laboratory
