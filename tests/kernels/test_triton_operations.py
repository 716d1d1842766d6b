"""The table of operations is whole: every row has a reference, and every kernel a test that compares it with that.

A kernel that is added to the table is added here, with the test that holds it.
"""

from __future__ import annotations

import ast
from inspect import Parameter, signature
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.drafters import draw as draft_draw
from outrider.drafters import synthetic
from outrider.kernels import cpu as native
from outrider.kernels import ops, reference, vendor_products
from outrider.kernels.cpu.products import NATIVE_MAX_ROWS
from outrider.kernels.ops import Kernel
from outrider.sample import draw as sampler_draw
from outrider.sample import sampler

HERE = Path(__file__).parent
OURS = (ops, sampler_draw, sampler, draft_draw, synthetic)  # modules that declare rows

# (operation, kind): the tests that compare its kernels with the reference, in the order of the row.
COMPARED = {
    ("rms_norm", "native"): ["test_native::test_norms"],
    ("rms_norm", "triton"): ["test_triton_rows::test_norms"],
    ("add_rms_norm", "native"): ["test_native::test_norms"],
    ("add_rms_norm", "triton"): ["test_triton_rows::test_norms"],
    ("norm_add_norm", "triton"): ["test_triton_rows::test_norm_add_norm_is_its_three_parts"],
    ("gated_norm", "triton"): ["test_triton_gated_norm::test_gated_norm"],
    ("silu_mul", "native"): ["test_native::test_activations"],
    ("silu_mul", "triton"): ["test_triton_rows::test_gated_activations"],
    ("gelu_tanh_mul", "native"): ["test_native::test_activations"],
    ("gelu_tanh_mul", "triton"): ["test_triton_rows::test_gated_activations"],
    ("limited_silu_mul", "triton"): ["test_triton_rows::test_the_limited_activation"],
    ("relu2", "triton"): ["test_triton_gated_norm::test_relu2"],
    ("scaled_linear", "triton"): ["test_coded_tiles_hopper::test_products", "test_triton_scaled::test_every_code"],
    ("scaled_wide", "triton"): [
        "test_coded_tiles_hopper::test_results_do_not_depend_on_other_token_rows",
        "test_triton_scaled::test_every_code"],
    ("rope_write", "native"): ["test_native::test_rope_write"],
    ("paged_attention", "native"): ["test_native::test_paged_attention"],
    ("linear", "triton"): [
        "../gpu/test_few_rows::test_linear", "test_triton_linear::test_matvec",
        "test_triton_linear::test_split_linear", "test_triton_linear::test_thin_linear",
    ],
    ("linear", "library"): ["test_float32_products::test_products_in_pieces"],
    ("linear_wide", "native"): ["test_triton_operations::test_wide_products_by_native_code"],
    ("linear_wide", "triton"): ["test_triton_operations::test_products_of_one_row", "../gpu/test_few_rows::test_wide"],
    ("linear_wide", "library"): ["test_triton_operations::test_wide_products_by_the_library"],
    ("gated_linear", "triton"): [
        "test_triton_operations::test_products_of_one_row", "../gpu/test_few_rows::test_gated",
        "test_triton_linear::test_gated_linear_is_the_product_then_the_activation",
    ],
    ("relu2_linear", "triton"): ["test_triton_operations::test_products_of_one_row"],
    ("linear_add", "library"): ["test_triton_operations::test_products_that_add_by_the_library"],
    ("linear_add", "triton"): ["test_triton_operations::test_products_of_one_row"],
    ("sigmoid_scale", "native"): ["test_native::test_scales_and_caps"],
    ("gelu_scale", "native"): ["test_native::test_scales_and_caps"],
    ("cap_logits", "native"): ["test_native::test_scales_and_caps"],
    ("visible_ranges", "triton"): ["test_triton_latent::test_ranges"],
    ("write_latents", "triton"): ["test_triton_latent::test_latents_are_written"],
    ("rotate_queries", "triton"): ["test_triton_latent::test_queries_are_rotated"],
    ("head_products", "triton"): ["test_triton_latent::test_products_of_heads"],
    ("latent_values", "triton"): ["test_triton_latent::test_values_of_few_token_rows"],
    ("enter_latents", "triton"): ["test_triton_latent::test_queries_enter_the_latent_space"],
    ("choose_positions", "triton"): [
        "../gpu/test_latent::test_choice", "test_triton_latent::test_the_choice_is_the_twins"],
    ("latent_attention", "triton"): ["../gpu/test_latent::test_attention", "test_triton_latent::test_chosen_positions"],
    ("dense_latent_attention", "triton"): [
        "../gpu/test_latent::test_attention", "test_triton_latent::test_whole_contexts"],
    ("arrange_codes", "triton"): ["test_triton_scaled::test_codes_in_tiles"],
    ("scaled_gated", "triton"): ["test_coded_tiles_hopper::test_products", "../gpu/test_coded_rows::test_operations"],
    ("scaled_rows", "triton"): ["test_triton_scaled::test_codes_in_tiles"],
    ("route", "triton"): ["test_triton_moe::test_route"],
    ("experts", "host"): ["../models/test_moe::test_the_cpu_means_what_the_reference_says"],
    ("experts", "triton"): ["test_triton_moe::test_experts"],
    ("scaled_experts", "host"): ["../models/test_quantized_files::test_the_cpu_multiplies_as_the_reference_says"],
    ("scaled_experts", "triton"): ["test_triton_scaled_experts::test_every_code"],
    ("experts_with_shared", "triton"): ["test_triton_moe::test_a_shared_expert_beside_the_chosen_ones"],
    ("join_embedding", "triton"): ["test_triton_draft::test_joined_inputs_equal_the_steps_one_by_one"],
    ("take_rows", "triton"): ["test_triton_draft::test_rows_of_two_matrices_are_taken_at_once"],
    ("find_ngram", "native"): ["test_triton_ngram::test_find_ngram"],
    ("find_ngram", "triton"): ["test_triton_ngram::test_find_ngram"],
    ("count_runs", "native"): ["test_native_sampler::test_runs_are_counted"],
    ("count_runs", "triton"): ["test_triton_sampler::test_runs_are_counted"],
    ("prepare_step", "native"): ["test_triton_step::test_native_code_equals_the_torch_code"],
    ("commit_step", "native"): ["test_triton_step::test_native_code_equals_the_torch_code"],
    ("prepare_linear", "host"): ["test_cpu_linear::test_equals_the_plain_product"],
    ("prepare_step", "triton"): ["test_triton_step::test_kernels_equal_the_torch_code"],
    ("commit_step", "triton"): ["test_triton_step::test_kernels_equal_the_torch_code"],
    ("store_drafts", "native"): ["test_triton_store_drafts::test_native_code_equals_the_torch_code"],
    ("store_drafts", "triton"): ["test_triton_store_drafts::test_the_kernel_equals_the_torch_code"],
    ("share_drafts", "triton"): ["test_triton_share_drafts::test_the_kernel_equals_the_torch_code"],
    ("plan_draft_passes", "native"): ["test_triton_draft::test_native_code_equals_the_torch_code"],
    ("plan_draft_passes", "triton"): ["test_triton_draft::test_kernels_equal_the_torch_code"],
    ("plan_reading_pass", "triton"): ["test_triton_draft::test_kernels_equal_the_torch_code"],
    ("plan_block_passes", "triton"): ["test_triton_draft::test_kernels_equal_the_torch_code"],
    ("plan_first_slots", "triton"): ["test_triton_draft::test_first_slots_equal_the_torch_code"],
    ("forget_pages", "native"): ["test_triton_draft::test_native_code_equals_the_torch_code"],
    ("forget_pages", "triton"): ["test_triton_draft::test_kernels_equal_the_torch_code"],
    ("choose_scaled", "triton"): ["test_triton_sampling::test_the_sampler_gives_the_same_with_kernels"],
    ("draw_tokens", "native"): ["test_native::test_tokens_are_drawn"],
    ("draw_tokens", "triton"): ["test_triton_sampling::test_the_sampler_gives_the_same_with_kernels"],
    ("sample_chunk", "native"): ["test_native_sampler::test_any_vocabulary_gives_what_the_torch_code_gives"],
    ("sample_chunk", "triton"): ["test_triton_sampler::test_any_batch_gives_what_the_torch_code_gives"],
    ("accept_at_rates", "triton"): ["test_triton_sampling::test_verdicts_at_rates_equal_the_torch_code"],
    ("sort_slots", "native"): ["test_triton_adapters::test_segments_are_whole_runs_of_a_slot"],
    ("sort_slots", "triton"): ["test_adapter_slots::test_rows_are_sorted_as_torch_sorts_them"],
    ("reduce_adapters", "native"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("reduce_adapters", "host"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("reduce_adapters", "triton"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("add_adapters", "native"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("add_adapters", "host"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("add_adapters", "triton"): ["test_triton_adapters::test_kernels_add_what_torch_adds"],
    ("add_adapters_gated", "host"): ["test_triton_adapters::test_activations_of_changed_products"],
    ("add_adapters_gated", "triton"): ["test_triton_adapters::test_activations_of_changed_products"],
    ("add_adapter_embeddings", "host"): ["test_triton_adapters::test_embeddings_are_changed_as_torch_changes_them"],
    ("add_adapter_embeddings", "triton"): ["test_triton_adapters::test_embeddings_are_changed_as_torch_changes_them"],
    ("add_head_adapters", "host"): ["test_triton_adapters::test_heads_are_changed_as_torch_changes_them"],
    ("add_head_adapters", "triton"): ["test_triton_adapters::test_heads_are_changed_as_torch_changes_them"],
    ("mix_adapted_experts", "host"): ["test_triton_adapters::test_experts_are_changed_as_torch_changes_them"],
    ("mix_adapted_experts", "triton"): ["test_triton_adapters::test_experts_are_changed_as_torch_changes_them"],
    ("write_block_keys", "triton"): ["test_triton_token_blocks::test_keys_of_blocks"],
    ("write_pooled_keys", "triton"): ["test_triton_pooled::test_keys_of_blocks"],
    ("list_blocks", "triton"): ["test_triton_pooled::test_choice_and_attention"],
    ("write_keys_values", "triton"): ["test_triton_token_blocks::test_keys_and_values"],
    ("block_attention", "triton"): ["test_triton_token_blocks::test_choice_and_attention"],
    ("join_streams", "triton"): ["test_triton_streams::test_streams"],
    ("mix_streams", "triton"): ["test_triton_streams::test_streams"],
    ("stream_gates", "triton"): ["test_triton_streams::test_gates"],
    ("read_streams", "triton"): ["test_triton_hyper_streams::test_the_kernels_are_the_twins"],
    ("write_streams", "triton"): ["test_triton_hyper_streams::test_the_kernels_are_the_twins"],
    ("draw_drafts", "triton"): ["test_triton_draft::test_float32_drafts_are_the_same_with_kernels"],
}

OURS_BY_NAME = [getattr(module, name) for module in OURS for name in {*vars(module), *getattr(module, "__all__", ())}]
ROWS = {name: operation for name, operation in ops.operations().items()
        if any(value is operation for value in OURS_BY_NAME)}
KERNELS = [(name, kernel) for name, operation in ROWS.items() for kernel in operation.kernels]


def test_every_kernel_is_compared_with_its_reference() -> None:
    declared = {pair: len(tests) for pair, tests in COMPARED.items()}
    rows = [(name, kernel.kind) for name, kernel in KERNELS]
    assert declared == {pair: rows.count(pair) for pair in rows}
    for test in {test for tests in COMPARED.values() for test in tests}:
        file, _, function = test.partition("::")
        tree = ast.parse((HERE / f"{file}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_every_row_has_a_reference_that_says_what_it_means() -> None:
    for name, operation in ROWS.items():
        assert operation.reference.__doc__ or name in vars(reference), name
        assert operation.reference.__module__.startswith("outrider."), name


@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=lambda value: value if isinstance(value, str) else value.kind)
def test_a_kernel_can_be_called_like_its_reference(name: str, kernel: Kernel) -> None:
    """With all arguments of the reference by position, and by name those that go by name only."""
    takes, function = kernel.load()
    given = signature(ROWS[name].reference).parameters.values()
    by_name = {parameter.name: None for parameter in given if parameter.kind is Parameter.KEYWORD_ONLY}
    by_position = [None] * (len(given) - len(by_name))
    signature(function).bind(*by_position, **by_name)
    if takes is not None:
        signature(takes).bind(*by_position, **by_name)


# Kernels that are only made for the table


def rows_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def test_products_of_one_row(device: torch.device, dtype: torch.dtype) -> None:
    """Wide, gated, squared and added to the residual: by the kernels for one token row, whatever their dtype."""
    x, weight, bias, residual = (rows_of(*shape).to(device, dtype) for shape in ((1, 72), (38, 72), (38,), (1, 38)))
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.05}
    wide = x.double(), weight.double()

    def only(operation: ops.Operation) -> object:  # type: ignore[type-arg]
        return next(kernel for kernel in operation.kernels if kernel.kind == "triton").load()[1]

    made = only(ops.linear_wide)(x, weight)  # type: ignore[operator]
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, reference.linear_wide(*wide).float(), **tolerance)
    for activation in ("silu", "gelu_pytorch_tanh"):
        made = only(ops.gated_linear)(x, weight, activation)  # type: ignore[operator]
        torch.testing.assert_close(made, ops.gated_linear.reference(*wide, activation).to(dtype), **tolerance)
    made = only(ops.relu2_linear)(x, weight)  # type: ignore[operator]
    torch.testing.assert_close(made, ops.relu2_linear.reference(*wide).to(dtype), **tolerance)
    wanted = residual.double()
    ops.linear_add.reference(wanted, *wide, bias.double())
    only(ops.linear_add)(residual, x, weight, bias)  # type: ignore[operator]
    torch.testing.assert_close(residual, wanted.to(dtype), **tolerance)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 65])
def test_wide_products_by_native_code(num_rows: int) -> None:
    if not native.available():
        pytest.skip(native.reason())
    x, weight = rows_of(num_rows, 40), rows_of(9, 40)
    assert ops.linear_wide.has_kernel(x, weight) == (num_rows <= NATIVE_MAX_ROWS), "then the library is faster"
    torch.testing.assert_close(ops.linear_wide(x, weight), reference.linear_wide(x, weight))
    half = weight.bfloat16()
    torch.testing.assert_close(ops.linear_wide(x, half), reference.linear_wide(x, half.float()))


def test_products_that_add_by_the_library(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many token rows without a bias; anything else is left to the reference."""
    monkeypatch.setattr(vendor_products, "MANY_ROWS", 5)
    residual, x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((5, 7), (5, 16), (7, 16)))
    wanted = residual.double()
    ops.linear_add.reference(wanted, x.double(), weight.double())
    with ops.using("library", ops.linear_add):
        assert not ops.linear_add.has_kernel(residual[:4], x[:4], weight)
        assert not ops.linear_add.has_kernel(residual, x, weight, residual[0])
        assert ops.linear_add.has_kernel(residual, x, weight)
        ops.linear_add(residual, x, weight)
    torch.testing.assert_close(residual.double(), wanted, rtol=8e-3, atol=8e-3)  # rounded once


def test_wide_products_by_the_library(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the library's product with wider results is for a GPU")
    x, weight = rows_of(100, 64).to(device, torch.bfloat16), rows_of(32, 64).to(device, torch.bfloat16)
    made = ops.linear_wide(x, weight)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, reference.linear_wide(x, weight), atol=1e-3, rtol=1e-3)


def test_wide_sums_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = rows_of(3, 40).bfloat16(), rows_of(25, 40).bfloat16()
    whole = reference.linear_wide(x, weight)
    assert whole.dtype == torch.float32 and reference.linear_wide(x.double(), weight.double()).dtype == torch.float64
    monkeypatch.setattr(reference, "MAX_WIDENED", 8)
    torch.testing.assert_close(reference.linear_wide(x, weight), whole)


# Launches


def test_kernels_that_the_host_launches_are_declared_as_such() -> None:
    """Otherwise their launches could not be collected, and they would be compiled while requests wait."""
    folder = Path(ops.__file__).parents[1] / "gpu"
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    jitted = {node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)
              and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)}
    launched = {node.value.id for tree in trees.values() for node in ast.walk(tree)
                if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)}
    assert len(jitted) > 10 and not jitted & launched
