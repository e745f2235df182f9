"""Loss, gradient norm and learning rate of tiny runs over 60 steps equal the golden files.

After an intended change, `python -m tests.golden.make_curves` rewrites the files and draws old and new curves.
"""

import numpy as np
import pytest

from bertjax.models import families
from bertjax.objectives.parsing import terms_of_stages
from bertjax.objectives.registry import OBJECTIVES
from tests import curves
from tests.checkpoints import on_one_device  # noqa: F401

CONFIGS = curves.configs()


@pytest.mark.parametrize("name", CONFIGS)
def test_curves_equal_the_golden_curves(name, tmp_path, on_one_device):  # noqa: F811
    trained, golden = curves.train(CONFIGS[name], tmp_path), curves.read(name)
    assert trained.keys() == golden.keys()
    for label, values in golden.items():
        assert len(values) in (1, curves.STEPS)
        np.testing.assert_allclose(trained[label], values, rtol=curves.TOLERANCE, atol=1e-6, err_msg=f"{name}: {label}")


def test_every_family_and_every_objective_has_a_curve():
    package_families = {name for name in families.FAMILIES.names() if name not in families.FAMILIES.registered}
    assert {config.model.family for config in CONFIGS.values()} == package_families
    learned = {term.name for config in CONFIGS.values() for term in terms_of_stages(config)}
    assert learned == {name for name in OBJECTIVES.names() if name not in OBJECTIVES.registered}
