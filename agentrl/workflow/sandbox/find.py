"""Selection of the sandbox of this machine. Each candidate is tested by running a program in it.

`auto` selects bwrap or, if bwrap does not work, landlock. Docker must be configured explicitly, and so must running without a
sandbox (`AGENTRL_SANDBOX=none-unsafe`). If no sandbox works, an error says what to install; there is no silent fallback.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from agentrl.workflow.errors import SandboxUnavailable
from agentrl.workflow.sandbox import Sandbox, cgroups, docker, landlock, spawn, uid_pool, unsafe
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.bwrap import Profile
from agentrl.workflow.sandbox.self_test import holds, interpreters
from agentrl.workflow.settings import Settings

PREFERRED_KINDS = ("bwrap", "landlock")


def install_hint(settings: Settings) -> str:
    """Return advice on what to install or change so that a sandbox works."""
    if settings.image:
        return "Run the compose stack on Linux 6.12 or newer, where its sandbox, landlock, works."
    return "apt-get install bubblewrap libseccomp2, or set AGENTRL_SANDBOX."


def find_sandbox(settings: Settings) -> Sandbox:
    """Return the sandbox that the settings name; for `auto`, the first that works on this machine. Raise SandboxUnavailable if
    the sandbox, or for `auto` every sandbox, does not work on this machine. The message says what each one lacks. Raise
    ConfigError if a setting is invalid.
    """
    lacking: dict[str, SandboxUnavailable] = {}
    for kind, result in attempts(settings):
        if not isinstance(result, SandboxUnavailable):
            return result
        lacking[kind] = result
    if settings.sandbox in lacking:
        raise lacking[settings.sandbox]
    problems = " ".join(f"{kind}: {error.message}" for kind, error in lacking.items())
    raise SandboxUnavailable(f"No sandbox for model-written code works on this machine. {problems}", install_hint(settings))


def attempts(settings: Settings) -> Iterator[tuple[str, Sandbox | SandboxUnavailable]]:
    """Try the kinds of sandboxes that the settings allow, preferred first. Stop at the first that works.

    Yield each kind that does not work with its error, and the kind that works with its sandbox. Raise ConfigError if a setting
    is invalid.
    """
    kinds = {"bwrap": find_bwrap, "landlock": landlock.find, "docker": docker.find, "none-unsafe": find_unsafe}
    for kind in PREFERRED_KINDS if settings.sandbox == "auto" else (settings.sandbox,):
        try:
            sandbox = kinds[kind](settings)
        except SandboxUnavailable as error:
            yield kind, error
        else:
            yield kind, sandbox
            return


def find_bwrap(settings: Settings) -> Sandbox:
    """Return the bwrap sandbox with the strictest profile that works on this machine. If possible, it keeps warm interpreters.
    Raise SandboxUnavailable if bwrap is not installed, or does not start.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable("The bwrap sandbox needs bubblewrap, and bubblewrap is not installed.", install_hint(settings))
    cgroups.sweep()
    uids = uid_pool.uid_range(settings.sandbox_uids)
    problem = "no interpreter was found"
    # A sandbox without its own /proc is still safe, and without bwrap's own ban the filter forbids user namespaces.
    for (python, folders), (proc, disable) in product(interpreters(settings), ((True, True), (True, False), (False, False))):
        profile = Profile(program, python, folders, proc, disable)
        comes_up, problem = try_profile(profile, uids)
        if comes_up:
            warm = replace(profile, nests=True)
            return Boxed(spawn.launch(warm if proc and try_profile(warm, uids)[0] else profile, uids))
    raise SandboxUnavailable(f"bubblewrap is installed, but its sandbox does not start here: {problem}", install_hint(settings))


def find_unsafe(settings: Settings) -> Sandbox:
    """Create a `Sandbox` that confines nothing."""
    python = next((python for python, _ in interpreters(settings)), sys.executable)
    return Boxed(unsafe.launch(python))


def try_profile(profile: Profile, uids: range) -> tuple[bool, str]:
    """Return whether a program runs in a bwrap sandbox with this profile, and the program's output."""
    sandbox = Boxed(spawn.launch(profile, uids))
    try:
        return holds(sandbox)
    finally:
        sandbox.close()
