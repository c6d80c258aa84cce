"""Settings by the names that others give them: what is not a setting of ours is answered with what to write instead.

meant("", "learning_rate", 3e-4, KEYS) == "learning_rate is not a setting; write optimizer.lr=0.0003"

One name for each setting, so that a job reads the same to everybody: these names are explained, and not accepted.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from fivefold.layout.layout import SPACES_HINT, Layout, with_commas
from fivefold.support.dtypes import precision_of
from fivefold.support.errors import Problem
from fivefold.support.parsing import join
from fivefold.support.text import either, nearest

Keys = Mapping[str, Sequence[str]]  # of every section of a job

# The words of Megatron-LM, Hugging Face's Trainer and configs, torchtitan, DeepSpeed and nanoGPT.
_SETTINGS = {
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "optimizer.warmup": "warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters num_warmup_steps",
    "optimizer.clip": "grad_clip max_grad_norm clip_grad max_norm gradient_clip_val gradient_clipping",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "adam_betas",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.schedule": "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "train.steps": "steps max_steps train_iters max_iters iters num_steps total_steps training_steps",
    "train.batch": "batch_size global_batch_size train_batch_size",
    "train.dtype": "precision mixed_precision mixed_precision_param torch_dtype",
    "train.eval_every": "eval_interval eval_steps",
    "train.log_every": "log_interval logging_steps log_freq",
    "train.compile": "torch_compile",
    "train.balance_rate": "moe_router_bias_update_rate load_balance_coeff bias_update_speed",
    "train.balance_loss": "aux_loss_coef aux_loss_coeff aux_loss_alpha moe_aux_loss_coeff router_aux_loss_coef "
    "seq_aux_loss_coeff",
    "train.router_z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "data.seq": "seq_len seq_length sequence_length max_seq_len max_seq_length block_size context_length",
    "data.path": "data_path dataset dataset_path train_data data_dir",
    "layout.dp": "data_parallel data_parallel_size dp_size data_parallel_replicate_degree",
    "layout.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size",
    "layout.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
    "pp_size",
    "layout.cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "layout.sp": "sequence_parallel",
    "layout.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
    "layout.dispatch": "moe_token_dispatcher_type token_dispatcher",
    "layout.zero": "zero_stage",
    "layout.microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps gradient_accumulation",
    "layout.schedule": "pipeline_schedule pipeline_parallel_schedule",
    "checkpoint.every": "save_interval save_steps checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "run.dir": "output_dir save_dir dump_folder out_dir",
    "run.name": "run_name experiment_name",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers",
    "model.hidden": "hidden_size n_embd dim d_model",
    "model.heads": "num_attention_heads n_head n_heads num_heads",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.ffn": "intermediate_size ffn_hidden_size ffn_dim",
    "model.experts.count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "model.experts.top_k": "moe_router_topk num_experts_per_tok num_experts_per_token experts_per_token moe_top_k",
    "model.experts.ffn": "moe_intermediate_size moe_ffn_hidden_size moe_inter_dim expert_ffn",
    "model.experts.shared": "n_shared_experts num_shared_experts",
    "model.experts.dense_layers": "first_k_dense_replace n_dense_layers",
    "model.experts.scores": "scoring_func moe_router_score_function score_func",
    "model.experts.renormalise": "norm_topk_prob route_norm",
    "model.experts.scale": "routed_scaling_factor moe_router_topk_scaling_factor route_scale",
    "model.experts.groups": "n_group moe_router_num_groups n_expert_groups",
    "model.experts.top_groups": "topk_group moe_router_group_topk n_limited_groups",
    "model.experts.balance_bias": "moe_router_enable_expert_bias",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.context": "max_position_embeddings n_positions",
    "model.tied": "tie_word_embeddings tie_embeddings",
}
ALIASES = {word: setting for setting, words in _SETTINGS.items() for word in words.split()}
NO_FP16 = "float16 would need a loss scale, which Fivefold does not have"
_BATCH_ANSWER = "a microbatch has train.batch / (layout.dp x layout.microbatches) sequences; write these three"
_EPOCHS_ANSWER = (
    "a run is as long as its steps; write train.steps = epochs x tokens of the data / (train.batch x data.seq)"
)
_RANKS_ANSWER = "ranks are started by --nproc, torchrun or srun; write --nproc {}"
_CAPACITY_ANSWER = "experts have no capacity, and no token is dropped; leave it out"
_WHOLE_EXPERTS = "an expert is whole on its rank; leave it out"
_RECOMPUTE = "write layout.recompute=selective or layout.recompute=full"
ANSWERS: dict[str, str] = {  # what is no setting under another name
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size", "local_batch_size", "micro_batch"), _BATCH_ANSWER
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), _EPOCHS_ANSWER),
    **dict.fromkeys(("nproc", "nproc_per_node", "world_size", "num_gpus", "gpus"), _RANKS_ANSWER),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "write both, as optimizer.betas=[0.9, 0.95]"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"), _RECOMPUTE),
    "min_lr": "the last rate is a share of the peak; write optimizer.final=0.1",
    **dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor", "expert_capacity_factor"), _CAPACITY_ANSWER),
    **dict.fromkeys(("expert_tensor_parallel_size", "expert_tensor_parallel_degree", "etp"), _WHOLE_EXPERTS),
    "fsdp": "sharded parameters are ZeRO 3; write layout.zero=3",
    "bf16": "write train.dtype=bfloat16",
    "fp16": f"{NO_FP16}; write train.dtype=bfloat16",
    "fp32": "write train.dtype=float32",
}


def explain(table: dict[str, Any], sections: Keys, problems: list[str]) -> None:
    """Take settings out of a job's table that go by another name, or stand elsewhere, and say what to write."""
    places = {"": table, **{key: value for key, value in table.items() if isinstance(value, dict)}}
    for section, key in [tuple(home.split(".")) for home in sections if "." in home]:
        if isinstance(inner := places.get(section, {}).get(key), dict):
            places[f"{section}.{key}"] = inner
    for section, values in places.items():
        known = sections.get(section, ()) if section else sections
        for key in [key for key in values if key not in known]:
            if sentence := meant(section, key, values[key], sections):
                problems.append(Problem("setting.unknown", sentence))
                del values[key]
                section_of, _, inner = section.partition(".")
                if inner and not values:
                    del table[section_of][inner]
    for section in [key for key, value in table.items() if key not in sections and value == {}]:
        del table[section]  # all of it was explained


def meant(section: str, key: str, value: Any, sections: Keys) -> str | None:
    """What to write instead of a setting that is none; None if nobody calls anything so."""
    wrong, plain = f"{join(section, key)} is not a setting", _plain(key)
    if plain in ANSWERS:
        return f"{wrong}: {ANSWERS[plain].format(value)}"
    homes = _homes(plain, sections)
    if not homes and not section:  # a name that is misspelt, and has no section
        known = dict.fromkeys((*sections, *ALIASES, *chain(*sections.values())))
        homes = [home for near in nearest(plain, known) if near not in sections for home in _homes(near, sections)]
    if not homes or isinstance(value, dict):
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{wrong}; write {either([f'{home}={text}' for home in homes])}"


def option_meant(name: str, words: Sequence[str], known: Sequence[str], takes: str, sections: Keys) -> str | None:
    """What to write instead of the option `--steps` with `words` behind it; None if nobody calls a setting so.

    `known` are the options that the command has, and `takes` the words that it takes, such as "[KEY=VALUE]...".
    """
    section, _, key = _plain(name).rpartition(".")
    value = words[0] if words and not words[0].startswith("-") else "true"
    homes = [f"{section}.{key}"] if key in sections.get(section, ()) else _homes(key, sections)
    write = ""
    if own := [option for option in known if set(homes) & set(_homes(_plain(option), sections))]:  # under another name
        write = f"{own[0]} {value}"
    elif "KEY=VALUE" not in takes or ("{}" in ANSWERS.get(key, "") and "--nproc" not in known):
        return None
    elif key in ANSWERS:
        return f"{name} is not an option: {ANSWERS[key].format(value)}"
    elif key == "layout" and key in sections:
        write = f"layout={with_commas(','.join([value.rstrip(','), *layout_parts(words[1:])]))}"
    elif key == "model" or value.endswith(".toml"):
        write = f"model={value}" if key == "model" and not takes.startswith("MODEL") else f"{value} as the first word"
    elif homes and homes[0].startswith("layout.") and "--layout" in known:
        write = f"{'--fix' if '--fix' in known else '--layout'} {homes[0].removeprefix('layout.')}={value}"
    elif homes:
        write = either([f"{home}={value}" for home in homes])
    return f"{name} is not an option; write {write}" if write else None


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def _homes(key: str, sections: Keys) -> list[str]:
    """Where a setting stands that was written without its section, or under another name."""
    if key in ALIASES:
        return [ALIASES[key]]
    homes = [f"{home}.{key}" for home, keys in sections.items() if key in keys]
    return [home for home in homes if home.count(".") == 1] or homes  # of a section, rather than of a table in one


def dtype_problem(word: str) -> str | None:
    """Of a precision that there is, and in which no run computes."""
    match precision_of(word):
        case "fp16":
            reason = f"train.dtype={word} cannot be trained in: {NO_FP16}; nearest: train.dtype=bfloat16"
            return Problem("train.dtype.fp16", reason)
        case "fp8":
            switch = "train.dtype=fp8 is a switch on top of bfloat16; write train.dtype=bfloat16 train.fp8=true"
            return Problem("train.dtype.fp8", switch)
    return None


def apart(words: Sequence[str], layout: str, how: str = "--layout ") -> list[str]:
    """Of a layout with spaces for commas, `--layout dp=8 zero=3`, quoted or not: how it is written in one piece."""
    parts = layout_parts(words) if layout else []
    joined = with_commas(",".join([layout.rstrip(", ") if parts else layout, *parts]))
    apart_by = Problem("layout.spaces", f"{SPACES_HINT}; write {how}{joined}")
    return [apart_by] if parts or joined != layout.strip() else []


def layout_changes(changes: Sequence[str], option: str) -> list[str]:
    """Of changes to the layout, where a layout comes by an option alone and they would be ignored: what to write."""
    ours = [change for change in changes if change.partition("=")[0].partition(".")[0] == "layout"]
    write = ",".join(change.removeprefix("layout").lstrip(".=") for change in ours)
    option = "--layout " if any(change.startswith("layout=") for change in ours) else option
    ignored = Problem("layout.ignored", f"{' '.join(ours)} would be ignored: write {option}{write}")
    return [ignored] if ours else []


def layout_parts(words: Sequence[str]) -> list[str]:
    """The words that belong to a layout, such as zero=3 and sp."""
    keys, bare = Layout.__struct_fields__, [word.strip(",") for word in words]
    return [word for word in bare if word.partition("=")[0] in keys and (word == "sp" or "=" in word)]
