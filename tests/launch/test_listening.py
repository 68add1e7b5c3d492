"""What a recipe says of other machines is tried before anything starts: each mistake with its place and a remedy."""

import socket
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.recipe.recipe import Recipe, validate
from stretto_app.extensions.joining import check_cluster
from stretto_cluster.address import bound
from tests.certificates import authority

REMEDY = "give host:port of this machine, with a free port"


def recipe(trainer: dict[str, Any] | None = None, **cluster: str | bool) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"path": "/a"},
        "task": {"kind": "arithmetic", "prompts": 64, "demonstrations": 0},
        "sampling": {"max_tokens": 4},
        "rollout": {"batch_size": 2},
        "trainer": trainer or {},
        "cluster": cluster,
    }
    return validate(tree, "recipe.toml")


def refusal(asked: Recipe) -> str:
    with pytest.raises(RecipeError) as refused:
        check_cluster(asked)
    return str(refused.value)


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("127.0.0.1", "is no host:port"),
        ("localhost", "is no host:port"),
        ("127.0.0.1:", "is no host:port"),
        ("127.0.0.1:65536", "is no host:port"),
        ("127.0.0.1:-1", "is no host:port"),
        ("nobody.invalid:7420", "ame"),  # a resolver's words
        ("192.0.2.1:7420", "Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(listen: str, found: str) -> None:
    said = refusal(recipe(listen=listen))
    assert said.startswith(f"cluster.listen: {listen!r}: ")
    assert found in said
    assert said.endswith(REMEDY)


def test_a_port_in_use_is_named_and_a_free_one_passes() -> None:
    with bound("127.0.0.1:0") as taken:
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refusal(recipe(listen=listen)) == f"cluster.listen: {listen!r}: Address already in use; {REMEDY}"
    check_cluster(recipe(listen=listen))
    check_cluster(recipe(listen=":0"))
    check_cluster(recipe())


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6_is_an_address_too() -> None:
    check_cluster(recipe(listen="[::]:0"))
    with bound("[::]:0", 0) as reserved:
        assert reserved.family == socket.AF_INET6


def test_machines_that_could_not_join_are_not_waited_for() -> None:
    without = 'and cluster.listen is empty: no machine can join; give cluster.listen="HOST:PORT"'
    ranks = {"ranks": 2, "remote_ranks": 1}
    assert refusal(recipe(ranks)) == f"trainer.remote_ranks: 1, {without}"
    check_cluster(recipe(ranks, placer="ray", trusted_network=True))
    with pytest.raises(RecipeError, match=r'placer = "given" needs listen'):
        recipe(placer="given")


def test_a_ray_cluster_that_does_not_answer_is_named() -> None:
    with bound("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for form in (address, f"ray://{address}"):
            said = refusal(recipe(placer="ray", ray=form))
            assert f"cluster.ray: {form!r}: no Ray cluster answers: Connection refused; ray start --head there" in said
        taken.listen()
        check_cluster(recipe(placer="ray", ray=address))


def test_certificates_are_read_and_all_mistakes_told_together(tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    check_cluster(recipe(tls=str(ours)))
    (ours / "cert.pem").write_text("no certificate")
    assert "give PEM files" in refusal(recipe(tls=str(ours)))
    said = refusal(recipe(tls=str(tmp_path / "nowhere"), listen="nowhere"))
    assert "nowhere/ca.pem does not exist" in said
    assert "is no host:port" in said


def test_ranks_meet_on_a_network_of_others_only_if_the_recipe_says_that_it_is_ours() -> None:
    ranks = {"ranks": 2, "remote_ranks": 1}
    elsewhere: tuple[dict[str, Any], ...] = ({"listen": "0.0.0.0:0"}, {"placer": "ray"})
    for cluster in elsewhere:
        said = refusal(recipe(ranks, **cluster))
        assert said.startswith("cluster.trusted_network: false, and trainer.remote_ranks = 1: collectives")
        check_cluster(recipe(ranks, trusted_network=True, **cluster))
        check_cluster(recipe(**cluster))
    check_cluster(recipe(ranks, listen="127.0.0.2:0"))
