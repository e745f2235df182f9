"""The default tier has an end-to-end test of each command and of each task.

`tests/test_curves.py` trains with each family and each objective.
"""

import pytest

from bertjax.cli.commands import COMMANDS
from bertjax.inference.tasks import TASKS

TESTS_OF_COMMANDS = {
    "train": "tests/cli/test_commands.py::test_main_trains_from_text_to_filled_masks",
    "prepare": "tests/cli/test_commands.py::test_main_trains_on_records_of_prepare_and_vocabulary",
    "vocabulary": "tests/cli/test_commands.py::test_main_trains_on_records_of_prepare_and_vocabulary",
    "compile": "tests/planner/test_plan.py::test_the_command_prints_json",
    "predict": "tests/cli/test_commands.py::test_predict_fills_masks_as_text_and_as_json",
    "evaluate": "tests/cli/test_commands.py::test_evaluate_counts_minimal_pairs",
    "serve": "tests/serving/test_serving.py::test_accepted_requests_are_answered_after_sigterm",
    "mine": "tests/embedding/test_retrieval.py::test_mined_negatives_are_used_in_training",
    "search": "tests/embedding/test_index.py::test_the_command_writes_and_reuses_an_index",
    "rerank": "tests/reranking/test_reranking.py::test_a_run_file_is_reranked_and_evaluated",
    "extract": "tests/inference/test_vectors.py::test_the_command_writes_vectors_of_a_table",
    "submit": "tests/finetuning/test_finetuning.py::test_predict_prints_json_lines_and_writes_submissions",
    "runs": "tests/reporting/test_overview.py::test_runs_are_listed_with_their_state",
    "report": "tests/cli/test_commands.py::test_report_describes_a_run",
    "convert": "tests/cli/test_commands.py::test_convert_round_trip_and_predict",
    "doctor": "tests/cli/test_doctor.py::test_the_command_describes_this_machine",
}
TESTS_OF_TASKS = {
    "glue": "tests/finetuning/test_finetuning.py::test_fine_tuning_trains_and_scores_a_task",
    "classify": (
        "tests/finetuning/test_classify.py::test_multi_label_training_and_prediction_with_the_threshold_of_the_dev_set"
    ),
    "squad": "tests/finetuning/test_squad.py::test_a_tiny_run_writes_predictions",
    "ner": "tests/finetuning/test_ner.py::test_a_tiny_run_trains_a_tagger",
    "tag": "tests/finetuning/test_ner.py::test_a_tiny_run_trains_a_tagger",
    "swag": "tests/finetuning/test_swag.py::test_a_tiny_run_trains_multiple_choice",
    "features": "tests/finetuning/test_features.py::test_a_sweep_over_feature_layers_trains_only_the_lstm",
    "rerank": "tests/reranking/test_reranking.py::test_training_improves_the_ranking_and_ranks_runs_by_ndcg",
    "embed": "tests/embedding/test_retrieval.py::test_a_file_is_evaluated_like_the_dev_set_with_the_tuned_thresholds",
}


@pytest.mark.parametrize(
    "names, tests", [(COMMANDS, TESTS_OF_COMMANDS), (TASKS.names(), TESTS_OF_TASKS)], ids=["commands", "tasks"]
)
def test_the_default_tier_has_an_end_to_end_test_of_every_command_and_task(names, tests, request):
    assert set(names) == set(tests)
    items = [item for item in request.session.items if not item.get_closest_marker("slow")]
    collected = {item.nodeid.partition("[")[0] for item in items}
    files = {test.partition("::")[0] for test in collected}
    missing = {test for test in tests.values() if test.partition("::")[0] in files} - collected
    assert not missing, "not collected, or marked as slow"
