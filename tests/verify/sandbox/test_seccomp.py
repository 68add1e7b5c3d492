"""The filter of system calls, run on the machine that it is written for (a small one, built here).

Promises: what is refused is refused whatever the arguments, what is not named is let through, numbers that are not
known and those of other architectures are not; a clone with a new namespace is refused, a thread never is.
"""

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_verify.sandbox.seccomp import (
    ALLOW,
    AND,
    ARCHITECTURE,
    ARCHITECTURES,
    ERRNO,
    FIRST_ARGUMENT,
    INSTRUCTION,
    JUMP_ANY_BIT,
    JUMP_AT_LEAST,
    JUMP_EQUAL,
    KILL,
    LOAD,
    NUMBER,
    RETURN,
    SECOND_ARGUMENT,
    call_filter,
)

X86 = ARCHITECTURES["x86_64"]
EPERM, ENOSYS = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
NEW_USER, THREAD = 0x10000000, 0x00010000
PTHREAD_FLAGS = 0x3D0F00
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decided(program: bytes, number: int, argument: int = 0, audit: int = X86.audit, second: int = 0) -> int:
    """What the kernel's machine makes of a call."""
    data = struct.pack("<IIQQQ", number, audit, 0, argument, second)
    places = NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT
    seen = {at: struct.unpack_from("<I", data, at)[0] for at in places}
    lines = list(INSTRUCTION.iter_unpack(program))
    at, held = 0, 0
    while True:
        code, then, otherwise, value = lines[at]
        at += 1
        match code:
            case c if c == LOAD:
                held = seen[value]
            case c if c == RETURN:
                return int(value)
            case c if c == JUMP_EQUAL:
                at += then if held == value else otherwise
            case c if c == JUMP_AT_LEAST:
                at += then if held >= value else otherwise
            case c if c == AND:
                held &= value
            case c if c == JUMP_ANY_BIT:
                at += then if held & value else otherwise
            case _:
                raise AssertionError(f"no such instruction: {code}")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_dangerous_calls_are_refused_and_ordinary_ones_are_not(machine: str) -> None:
    architecture, program = ARCHITECTURES[machine], call_filter(machine)
    for name in ("socket", "ptrace", "mount", "unshare", "bpf", "io_uring_setup", "keyctl", "process_vm_readv"):
        assert decided(program, architecture.numbers[name], audit=architecture.audit) == EPERM
    for name in ("kill", "tgkill", "fchmod"):
        assert decided(program, architecture.numbers[name], audit=architecture.audit) == ALLOW
    assert decided(program, architecture.numbers["clone3"], audit=architecture.audit) == ENOSYS


@given(number=st.integers(0, 2**32 - 1), argument=st.integers(0, 2**32 - 1))
def test_only_named_calls_are_refused_and_unknown_numbers_do_not_exist(number: int, argument: int) -> None:
    decision = decided(call_filter("x86_64"), number, argument)
    if number > 462:
        assert decision == ENOSYS
    elif number not in X86.numbers.values():
        assert decision == ALLOW
    assert decided(call_filter("x86_64"), number, argument, audit=0x40000003) == KILL  # a 32-bit call


@given(flags=st.integers(0, 2**32 - 1))
def test_a_clone_may_make_threads_and_processes_but_no_namespace(flags: int) -> None:
    clone = X86.numbers["clone"]
    assert (decided(call_filter("x86_64"), clone, flags) == EPERM) == bool(flags & 0x7E020080)
    alone = decided(call_filter("x86_64", among_others=True), clone, flags)
    assert (alone == ALLOW) == (bool(flags & THREAD) and not flags & 0x7E020080)


def test_a_thread_and_an_ordinary_fork_are_what_they_were() -> None:
    assert decided(call_filter("x86_64"), X86.numbers["clone"], PTHREAD_FLAGS) == ALLOW
    assert decided(call_filter("x86_64"), X86.numbers["clone"], 17) == ALLOW
    assert decided(call_filter("x86_64", among_others=True), X86.numbers["clone"], 17) == EPERM
    assert decided(call_filter("x86_64", among_others=True), X86.numbers["fork"]) == EPERM


def test_limits_may_be_read_and_set_for_oneself_only() -> None:
    program = call_filter("x86_64")
    assert decided(program, X86.numbers["prlimit64"], 0) == ALLOW
    assert decided(program, X86.numbers["prlimit64"], 1234) == EPERM


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("command", range(20))
def test_no_file_may_be_locked_or_told_whom_to_signal_and_when(machine: str, command: int) -> None:
    architecture, program = ARCHITECTURES[machine], call_filter(machine)
    found = decided(program, architecture.numbers["fcntl"], 3, architecture.audit, second=command)
    assert (found == EPERM) == (command in (6, 7, 8, 10, 15))  # locks, F_SETOWN, F_SETSIG, F_SETOWN_EX


@given(family=st.integers(0, 50), kind=st.integers(0, 2**32 - 1))
def test_of_sockets_there_are_connected_pairs_of_streams_alone(family: int, kind: int) -> None:
    found = decided(call_filter("x86_64"), X86.numbers["socketpair"], family, second=kind)
    assert (found == ALLOW) == (family == 1 and kind & 0xF == 1)


def test_a_program_ends_with_its_guest_and_changes_no_file_of_its_user() -> None:
    among_others = call_filter("x86_64", among_others=True)
    assert decided(among_others, X86.numbers["prctl"], 1) == EPERM
    assert decided(among_others, X86.numbers["prctl"], 15) == ALLOW  # the name of a thread
    for name in ("chmod", "fchmodat2", "utimensat", "setxattr", "fremovexattr", "lchown"):
        assert decided(among_others, X86.numbers[name]) == EPERM
    assert decided(among_others, X86.numbers["ioctl"], 3, second=0x40086602) == EPERM
    assert decided(among_others, X86.numbers["ioctl"], 3, second=0x5401) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    real = {name: int(number) for name, number in lines}
    newest = max(real.values())  # headers may be older than the newest calls
    known = {name: number for name, number in ARCHITECTURES[machine].numbers.items() if number <= newest}
    assert {name: real.get(name) for name in known} == known


def test_a_machine_without_a_table_has_no_filter() -> None:
    with pytest.raises(KeyError):
        call_filter("riscv64")
