"""The launch profiles."""

import pytest

from oubliette.server.droids.profiles import builtin


def test_the_built_in_droid_runs_commands_only_where_the_box_isolates_them() -> None:
    assert "--no-commands" in builtin.profile(commands=False, autonomy="high").argv
    assert "--no-commands" not in builtin.profile(commands=True, autonomy="high").argv


@pytest.mark.parametrize("autonomy, mode", [("off", "ask"), ("low", "ask"), ("medium", "auto"), ("high", "auto")])
def test_the_built_in_droid_asks_where_the_autonomy_would_deny(autonomy: str, mode: str) -> None:
    assert builtin.profile(commands=True, autonomy=autonomy).mode == mode
