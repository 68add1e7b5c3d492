"""The paths that the installed SDK asks a server for, and the losses that it names, as JSON."""

import json
import re
from pathlib import Path
from typing import get_args

import tinker
from tinker.types import LossFnType

paths = set()
for file in Path(tinker.__file__).parent.rglob("*.py"):
    if not file.stem.endswith("_test"):
        for path in re.findall(r"""["'](/api/v1/[^"']*)["']""", file.read_text()):
            named = path.replace("{checkpoint_id}", "weights/some")  # an id of a checkpoint has its kind
            paths.add(re.sub(r"{[^}]*}", "some", named))
print(json.dumps({"paths": sorted(paths), "losses": get_args(LossFnType)}))
