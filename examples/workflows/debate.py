"""Two roles of one policy in one trajectory: separate conversations, generated side by side, rewarded separately."""

from __future__ import annotations

import asyncio

import stretto


class Debate(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
        other = chat.new([{"role": "user", "content": task.prompt}], cause="opponent")
        one, two = await asyncio.gather(chat.generate(), other.generate())
        first, second = await asyncio.gather(chat.score(one.text), chat.score(two.text))
        return stretto.Reward(max(first, second), by_turn={one.node: first - second, two.node: second - first})
