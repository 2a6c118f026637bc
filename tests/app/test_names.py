"""The public names of the package, and how light importing it is."""

import subprocess
import sys

import pytest

import bayestrain as bt


def test_the_public_names() -> None:
    assert len(bt.__all__) == 21
    assert bt.__all__ == sorted(bt.__all__)
    for name in bt.__all__:
        assert getattr(bt, name) is getattr(bt, name)
    assert {*bt.__all__, "data", "posterior", "__version__"} <= {*dir(bt)}


def test_rooms_are_attributes_and_data_is_a_shortcut() -> None:
    from bayestrain import data

    assert data.__name__ == "bayestrain.app.data"
    assert bt.posterior.Regression.__name__ == "Regression"


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, bayestrain; assert 'torch' not in sys.modules; bayestrain.formats; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        bt.nothing  # noqa: B018
