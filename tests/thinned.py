"""Which cases of the expensive tests run by default.  `.ci/run --all` and `pytest -m ""` run all.

A law is the same in every case of its test.  What differs is the proposer, the rule, the layout or
the setting that it is tried with, and each case compiles programs of its own.  The cases that run
by default take about two thirds of the time of those that ran before this table was written.
`test_the_default_pairs_cover` holds that every shape, source and rule still occurs in the laws.
"""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Sequence

import pytest

KEPT: dict[str, Sequence[str]] = {
    "test_adapters.py::test_a_row_alone_is_that_row_in_a_batch": ["equinox", "recurrent linen"],
    "test_adapters.py::test_greedy_speculation_is_greedy_decoding": [
        "linen-draft", "nnx-ngram", "equinox-draft", "function-ngram", "cached function-tree",
        "recurrent linen-draft", "recurrent function-ngram",
    ],
    "test_adapters.py::test_the_check_passes_what_is_right": [
        "nnx", "cached function", "recurrent linen",
    ],
    "test_adaptive.py::test_a_chain_up_to_a_depth_is_the_beginning_of_the_whole_one": [
        "draft 3", "eagle3", "universal",
    ],
    "test_adaptive.py::test_a_draft_that_rested_drafts_as_if_it_had_not": ["pauses1", "pauses3"],
    "test_adaptive.py::test_the_default_measures_once_and_keeps_the_text": [
        "0.0-True", "0.9-False",
    ],
    "test_audit_faults.py::test_a_fault_is_found": [
        "flat mask on a tree", "penalties without drafted tokens", "noise keyed by row index",
    ],
    "test_audit_faults.py::test_the_campaign_fails_if_a_fault_is_missed": ["greedy-False"],
    "test_auditing.py::test_sound_decoders_pass": ["tree of 21 nodes", "processors"],
    "test_best_first.py::test_leaving_out_what_does_not_pay_keeps_the_joint_distribution": [
        "independent deep", "corrected",
    ],
    "test_best_first.py::test_rejection_keeps_the_joint_distribution": [
        "independent", "corrected deep",
    ],
    "test_block_drafts.py::test_greedy_drafts_are_those_of_a_reference_without_caches": [
        "dflash", "dflash2", "domino_shifted", "dspark_rnn", "jetspec",
    ],
    "test_block_drafts.py::test_greedy_texts_are_those_of_plain_decoding": [
        "dspark_rnn-rejection", "jetspec-match", "dflash2-block",
    ],
    "test_block_drafts.py::test_the_context_does_not_depend_on_how_it_came": [
        "dflash_sliding-chain", "dspark_rnn-tree",
    ],
    "test_calls.py::test_first_of_takes_heads": ["lookup first"],
    "test_calls.py::test_what_is_timed_compiles_nothing": ["stop0-True", "zzz-False"],
    "test_commands.py::test_json_is_one_object": ["proposer0-0.8", "proposer1-0.0"],
    "test_commands.py::test_other_proposers": ["dynamic-tree", "early-exit"],
    "test_commands.py::test_the_shipped_drafter_drafts_a_chain_or_a_tree": ["more1"],
    "test_compile.py::test_a_step_copies_no_cache": ["none", "draft tree"],
    "test_compile.py::test_equal_decoders_share_their_programs": ["match", "rejection"],
    "test_constraint.py::test_generate": ["1.0"],
    "test_constraint_campaign.py::test_a_short_campaign": ["12", "42"],
    "test_constraint_laws.py::test_deliberate_faults_are_caught": [
        "Flat-1.0", "Late-0.0", "Unmasked-1.0",
    ],
    "test_constraint_laws.py::test_samples_follow_the_constrained_target": [
        "draft tree-Rejection()", "eagle3, a reduced vocabulary-Rejection()", "draft-Match()",
    ],
    "test_contract.py::test_a_step_is_propose_verify_commit": [
        "translated dynamic tree-rejection", "ngram-threshold",
    ],
    "test_decoder.py::test_exact_rules_hold_under_another_default_of_random_numbers": ["rejection"],
    "test_decoder.py::test_step_vmaps": ["rejection"],
    "test_distill.py::test_a_resumed_distillation_is_uninterrupted": ["*--draft-fraction*"],
    "test_distribution.py::test_samples_follow_the_target": [
        "none-match-*", "draft-rejection-*", "draft-block-*", "draft tree-rejection-*",
        "dynamic tree-rejection-*", "eagle3, a reduced vocabulary-rejection-*",
        "first of-rejection-*", "best first-rejection-*", "ngram-rejection-*",
        "adaptive-rejection-*", "medusa-rejection-*", "universal-rejection-*",
    ],
    "test_distribution.py::test_wrong_rules_are_caught": [
        "argmax drafts with soft probabilities", "noise reused for the residual", "no residual",
    ],
    "test_documents.py::test_the_answer_as_a_document": ["ngram-0.0"],
    "test_draft_laws.py::test_a_draft_may_have_another_padded_vocabulary": [
        "match-35", "rejection-24", "block-35",
    ],
    "test_draft_laws.py::test_an_end_inside_a_block_ends_the_row": ["match", "block", "typical"],
    "test_eagle3.py::test_drafts_are_those_of_the_reference": [
        "authors, shared", "ModelOpt, two layers", "speculators, 3.1", "DeepSpec",
    ],
    "test_eagle3.py::test_every_rule_takes_a_chain": ["block", "threshold"],
    "test_eagle3.py::test_the_state_after_steps_is_that_of_a_fresh_prefill": [
        "speculators, one norm",
    ],
    "test_families.py::test_text": ["smollm3"],
    "test_generate.py::test_row_of_a_batch_is_the_prompt_alone": ["ngram-1.0", "draft-0.0"],
    "test_generate.py::test_stats_add_up": ["none-match", "ngram-rejection", "draft-match"],
    "test_models.py::test_greedy_text": ["draft"],
    "test_pairing.py::test_the_text_is_the_targets_own": ["foreign-1.0", "sentencepiece-0.0"],
    "test_platforms.py::test_texts_are_the_same_in_every_form": [
        "tpu-dynamic tree-match", "gpu-draft 3-rejection",
    ],
    "test_prefill.py::test_decoding_from_chunks": ["medusa tree", "universal"],
    "test_properties_caches.py::test_a_cache_is_a_list_of_tokens": [
        "kv", "window", "ring in bfloat16",
    ],
    "test_proposers.py::test_proposals_are_trees_of_distinct_siblings": [
        "draft tree-match", "dynamic tree-rejection", "early exit tree-rejection",
        "translated dynamic tree-rejection",
    ],
    "test_ring.py::test_the_text_is_that_of_a_full_cache": ["chain", "early exit tree"],
    "test_save_drafter.py::test_drafts_are_the_same": ["eagle3, reduced", "dspark, own"],
    "test_students.py::test_a_student_that_is_like_its_target": ["qwen3", "gpt2", "gemma3_text"],
    "test_taps.py::test_a_proposer_meets_the_features_of_all_that_is_committed": [
        "draft 3-match-chunks", "tree-rejection-one pass",
    ],
    "test_train_drafter.py::test_a_drafter_learns_inside_speculation": ["eagle3"],
    "test_train_drafter.py::test_a_run_learns_and_its_folder_drafts": ["peagle", "dspark"],
    "test_train_drafter.py::test_training_reads_what_a_decoder_reads": [
        "eagle3", "peagle", "dflash", "dspark, gated",
    ],
    "test_train_padding.py::test_a_draft_whose_vocabulary_is_padded": ["more0", "more2"],
    "test_train_recipes.py::test_a_recipe_runs": [
        "eagle3", "gkd", "pycode-draft-1",
    ],
    "test_train_recordings.py::test_a_drafter_learns_without_its_target": ["dspark"],
    "test_transformers.py::test_same_settings_same_tokens": ["llama-all"],
    "test_universal.py::test_another_name_for_every_token_changes_nothing": ["match", "block"],
    "test_universal.py::test_without_a_shared_token_nothing_is_proposed": ["rejection", "typical"],
}  # fmt: skip
"""Test -> patterns of the cases that run by default."""


LONG = {
    "test_bench.py::test_int8_beside_float32": "the same table with one dtype",
    "test_bench_tpu.py::test_cells_are_measured_beside_their_prediction": "cells without measuring",
    "test_calls.py::test_first_of_takes_a_bank_beside_a_draft": "the same with heads",
    "test_campaigns.py::test_a_short_soak": "a soak of 20 calls that finds a wrong text",
    "test_commands_measured.py::test_audit_of_medusa_heads": "the audit of a draft model",
    "test_constraint_campaign.py::test_texts_on_four_devices": "the campaign on one device",
    "test_cost_aware.py::test_costs_are_measured_and_used": "the block of docs/decoding.md",
    "test_drafter_meshes.py::test_a_drafter_follows_its_target_onto_a_mesh": "tests/tpu, compiled",
    "test_eagle3_parallel.py::test_generate_writes_what_plain_decoding_writes": "that of EAGLE-3",
    "test_load_drafter.py::test_a_target_in_int8": "targets in int8 in test_quantised.py",
    "test_overlap.py::test_generate_and_the_command": "the law of texts; generate on one device",
    "test_overlap.py::test_two_processes": "the law of texts on two meshes; test_processes.py",
    "test_pairing.py::test_a_draft_that_agrees_is_accepted": "texts of the same pairs",
    "test_programs.py::test_generate_keeps_as_many_structures_as_it_is_told": "its cache alone",
    "test_sharding.py::test_eight_devices": "test_every_mesh",
    "test_sharding.py::test_published_drafters_on_every_mesh": "tests/tpu, compiled",
}
"""Tests that take long and do not run by default -> what runs in their place."""

COLLECTED: dict[str, list[str]] = collections.defaultdict(list)
"""Test -> the cases that this process has collected."""


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that do not run by default as slow."""
    for item in items:
        name, _, case = item.nodeid.removesuffix("]").partition("[")
        name = name.rpartition("/")[2]
        COLLECTED[name].append(case)
        if name in LONG or (name in KEPT and not stays(name, case)):
            item.add_marker(pytest.mark.slow)


def stays(name: str, case: str) -> bool:
    """Does this case of a test in `KEPT` run by default?"""
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in KEPT[name])
