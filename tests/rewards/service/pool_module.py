"""The rewards of the tests, as the text of a module: they hang, die, leak, and say what is no verdict."""

MODULE = """
import os, signal, sys, time
leaked = []
def leaks(prompt, completion, answer):
    leaked.append(open(os.devnull))
    return len(leaked) <= int(answer)
def reward(prompt, completion, answer):
    print("noise on stdout")
    if completion == "hang": signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while completion == "hang": pass
    if completion == "exit": os._exit(3)
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "leave": sys.exit(1)
    if completion == "none": return None
    if completion == "slow": time.sleep(0.05)
    if completion == "once" and not os.path.exists(answer):
        open(answer, "w").close()
        os._exit(1)
    return completion == answer
def garbage(prompt, completion, answer):
    for fd in (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
        try: answer in os.readlink(f"/proc/self/fd/{fd}") and os.write(fd, bytes.fromhex(completion))
        except OSError: pass
    return True
def floods(prompt, completion, answer):
    for _ in range(64): os.write(1, b"x" * (1 << 20))
    print("last", time.sleep(1))
    return True
def stopped(prompt, completion, answer):
    with open(answer, "a") as file: file.write(f"{os.getpid()} ")
    until = time.process_time() + 0.05
    while time.process_time() < until: pass
    return True
def greedy(prompt, completion, answer):
    return len(bytearray(1 << 30)) > 0
"""
