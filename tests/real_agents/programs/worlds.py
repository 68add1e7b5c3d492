"""A game of textarena and an environment behind OpenEnv, played by rule; prints their episodes."""

import json
import sys
import threading
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.insert(0, str(Path(sys.argv[1]) / "examples" / "worlds"))
from openenv_world import Remote
from textarena_world import Game


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Guessing(Environment):
    """A number from 1 to 20, which is the seed's."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **further):
        self._number, self._steps = (seed or 0) % 20 + 1, 0
        return Hint(text="Guess a number from 1 to 20.")

    def step(self, action, timeout_s=None, **further):
        self._steps += 1
        found = int(action.message.strip("[]"))
        if found == self._number:
            return Hint(text="", done=True, reward=1.0)
        return Hint(text="The target number is " + ("lower." if found > self._number else "higher."))

    @property
    def state(self):
        return State(step_count=self._steps)


def played(world, seed):
    """Each observation, by halving; the sum of the rewards at the end."""
    low, high, told, total = 1, 20, [world.reset(seed)], 0.0
    for _ in range(10):
        guess = (low + high) // 2
        observation, reward, done = world.step(f"[{guess}]")
        total += reward
        if done:
            break
        told.append(observation)
        low, high = (low, guess - 1) if "lower" in observation else (guess + 1, high)
    world.close()
    return [told, total]


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
server = uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[2]), log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.01)
url = f"http://127.0.0.1:{sys.argv[2]}"
made = {"textarena": lambda: Game("GuessTheNumber-v0"), "openenv": lambda: Remote(url, "message", "text")}
print(json.dumps({name: [played(make(), seed) for seed in (7, 7, 11)] for name, make in made.items()}))
server.should_exit = True
