"""What the SDK offers, used as its users do; says "done" where everything was as it should be."""

import sys

import numpy as np
import peft
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

base = sys.argv[1]
service = tinker.ServiceClient(user_metadata={"of": "surface"}, display_name="surface")
rest = tinker.RestClient()
[model] = rest.get_server_capabilities().result().supported_models
assert (model.model_name, model.trainable, model.sampleable) == (base, True, True), model

training = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()
assert training.get_info().lora_rank == 8
tokenizer = training.get_tokenizer()
ids = tokenizer.encode("hello world, hello moon")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
)
losses = []
for _ in range(8):
    computed = training.forward_backward([datum] * 4, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(computed.result().metrics["loss:sum"])
    assert stepped.result().metrics["grad_norm"] > 0
assert losses[-1] < losses[0] / 2, losses
assert training.forward([datum] * 600, "cross_entropy").result().metrics["loss:sum"] > 0  # several requests


def squares(data, logprobs):
    loss = sum((row**2).sum() for row in logprobs)
    return loss, {"squares": float(loss)}


custom = training.forward_backward_custom([datum], squares)
training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
assert abs(custom.result().metrics["loss:sum"] - custom.result().metrics["squares"]) < 1e-4


def traced(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
training.forward_backward_custom([datum], handle).result()
training.optim_step(types.AdamParams(learning_rate=0.0)).result()

state = training.save_state("one", user_metadata={"step": "9"}).result().path
again = service.create_training_client_from_state_with_optimizer(state).result()
loss, loss_again = (
    client.forward([datum], "cross_entropy").result().metrics["loss:sum"] for client in (training, again)
)
assert loss == loss_again, (loss, loss_again)

sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokenizer.encode("hello"))
settings = types.SamplingParams(max_tokens=12, temperature=1.0, seed=4)
first, second = (sampler.sample(prompt, 3, settings, topk_sample_logprobs=2).result() for _ in range(2))
assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
assert len({one.sequence_id for one in (*first.sequences, *second.sequences)}) == 6
assert len(first.sequences[0].topk_logprobs[0]) == 2
for one in first.sequences:
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt.to_ints(), *one.tokens])).result()
    np.testing.assert_allclose(scored[len(prompt.to_ints()) :], one.logprobs, atol=1e-4)
whole = sampler.sample(
    prompt,
    1,
    types.SamplingParams(max_tokens=1),
    include_prompt_logprobs=True,
    topk_prompt_logprobs=3,
    prompt_alt_tokens_k=2,
    target_prompt_logprobs=types.TensorData.from_torch(torch.tensor([[t] for t in prompt.to_ints()[1:]])),
).result()
np.testing.assert_allclose(whole.target_prompt_logprobs.to_torch()[:, 0], whole.prompt_logprobs[1:], atol=1e-4)
assert whole.prompt_alt_tokens.tokens.shape == [len(prompt.to_ints()) - 1, 2]
many = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6)) for _ in range(60)]
assert all(len(one.result().sequences) == 2 for one in many)
inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
assert inflight.sample(prompt, 1, settings).result().sequences[0].tokens
shared = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
assert shared.sample(prompt, 1, settings).result().sequences[0].tokens

path = training.save_weights_for_sampler("named", ttl_seconds=3600).result().path
named = service.create_sampling_client(model_path=path).result()
assert named.get_base_model() == base
external = training.save_weights_external("for-others").result().path
urls = rest.get_external_weights_urls(external).result().urls
assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
kinds = sorted(one.checkpoint_type for one in rest.list_checkpoints(training.model_id).result().checkpoints)
assert kinds == ["external", "sampler", "training"], kinds
assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 8
assert rest.get_training_run(training.model_id).result().base_model == base
rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
rest.publish_checkpoint_from_tinker_path(state).result()
rest.delete_checkpoint_from_tinker_path(path).result()


def refusal(kind, call):
    """What the error says that the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


deleted = refusal(tinker.NotFoundError, lambda: service.create_sampling_client(model_path=path).result())
assert "there are no weights" in deleted, deleted
unserved = refusal(tinker.RequestFailedError, lambda: training.forward_backward([datum], "stable_reinforce").result())
assert "stable_reinforce is not served" in unserved, unserved

page = rest.search_sessions(types.SessionSearchRequest(display_name="surf", limit=1)).result()
assert page.sessions[0].status.type == "active", page

print("run", training.model_id)
print("state", state)
service.close("success").result()

loaded = AutoModelForCausalLM.from_pretrained(base)
if len(sys.argv) > 2:
    adapted = peft.PeftModel.from_pretrained(loaded, sys.argv[2])
    logits = adapted(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    own = -float(logits.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    print("peft", own)
print("done")
