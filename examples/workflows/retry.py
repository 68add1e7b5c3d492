"""A user-defined workflow: the model tries again when it is wrong, and each try gets its own reward.

In a recipe beside this file::

    [workflow]
    function = "retry:Retry"

    [workflow.settings]
    tries = 3
"""

from __future__ import annotations

import stretto


class Retry(stretto.Workflow):
    def __init__(self, tries: int = 2, hint: str = "?") -> None:
        self.tries, self.hint = tries, hint

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
        scores = []
        for _ in range(self.tries):
            reply = await chat.generate()
            scores.append(await chat.score(reply.text))
            if scores[-1].right:
                break
            chat.say(self.hint + task.prompt)
        return stretto.Reward(scores[-1], by_turn=scores, named={"first": scores[0]})
