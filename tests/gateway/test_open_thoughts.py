"""A thought that the chat template has begun: what the model says before it ends is reasoning, and no answer."""

from __future__ import annotations

from pathlib import Path

from tests.gateway.serving import ScriptedModel, in_a_loop, served_gateway, tokenizer_of

ASK = [{"role": "user", "content": "1+2?"}]


@in_a_loop
async def test_a_thought_that_the_prompt_has_begun_is_reasoning_and_no_answer(tmp_path: Path) -> None:
    for said, reasoning, content in (("hm", "hm", ""), ("hm</think>\n\nyes", "hm", "yes"), ("", "", "")):
        tokenizer = tokenizer_of("qwen2_5")
        tokenizer._whole.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
        model = ScriptedModel(lambda prompt, said=said: said, tokenizer)  # type: ignore[misc]
        async with served_gateway(model, tmp_path) as gateway:
            reply = await gateway.chat(await gateway.open(), ASK)
        told = reply.json()["choices"][0]["message"]
        assert (told.get("reasoning_content") or "", told["content"] or "") == (reasoning, content)
