"""The built-in droid: runs scripted plans, in any box that has Python."""

from oubliette.server.droids.driver import LaunchProfile

_ARGV = ("{python}", "-I", "-S", "{program}", "droid")


def profile(*, commands: bool, autonomy: str) -> LaunchProfile:
    """`commands` only where the box isolates them. It asks before its calls where the autonomy would deny some."""
    return LaunchProfile(
        name="builtin",
        argv=_ARGV if commands else (*_ARGV, "--no-commands"),
        mode="ask" if autonomy in ("off", "low") else "auto",
        list_changed="live",
        resume="resume",
    )
