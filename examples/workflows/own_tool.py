"""A user-defined tool for a model without a chat template: the text after the last ``?`` of a completion is looked up.

The call is on record before it is made, so it is not made again after a crash of the run.
"""

from __future__ import annotations

import stretto

SUMS = {f"{a}+{b}": a + b for a in range(10) for b in range(10)}


def look_up(sum_of: str) -> str:
    return str(SUMS[sum_of])


class Asking(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        reply = await chat.generate()
        _, asked, question = reply.text.rpartition("?")
        if asked:
            found = await chat.tool("look_up", {"sum_of": question}, look_up)
            chat.say(f"={found};" if found.isdecimal() else ";")  # an exception of the tool is returned as text
            reply = await chat.generate()
        return await chat.score(reply.text)
