"""Two tables of config keys: keys that do not change a model's results here, each with the reason, and keys that do and
are not supported. `config_reader.py` refuses a key that is in neither table and that no family reads."""

from __future__ import annotations

_HARMLESS_BY_REASON: dict[str, str] = {
    "Names, versions and tools, which say where a checkpoint comes from.": """
        _name_or_path _model_name_or_path _commit_hash transformers_version model_type architectures auto_map
        transformers.js_config unsloth_fixed unsloth_version speculators_version is_llama_config has_no_defaults_at_init
        embed_requires_grad tokenizer_class processor_class finetuning_task model_name
        """,
    "The type of numbers in the files; the engine's `dtype` decides in which type is computed.": """
        dtype torch_dtype mamba_ssm_dtype mamba_ssm_cache_dtype use_bfloat16
        """,
    "Tokens that the tokenizer or the request decides about; ends of texts are read elsewhere.": """
        bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id
        decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens pad_token_index
        """,
    "How transformers runs a model or what it returns.": """
        use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores torchscript
        chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_internal
        _attn_implementation_autoset _experts_implementation _experts_implementation_internal use_flash_attn
        _flash_attn_2_enabled cache_implementation cache_config num_logits_to_keep logits_to_keep use_mamba_kernels
        gradient_checkpointing chunk_size mamba_chunk_size tie_encoder_decoder
        base_model_tp_plan base_model_pp_plan base_model_ep_plan tf_legacy_loss
        """,
    "Of training alone: initial values, dropout, losses, the machines it ran on.": """
        initializer_range initializer_factor init_std init_method rescale_prenorm_residual
        attention_dropout hidden_dropout resid_dropout residual_dropout embd_dropout embd_pdrop attn_pdrop resid_pdrop
        dropout hidden_dropout_prob attention_probs_dropout_prob classifier_dropout summary_first_dropout
        output_router_logits router_aux_loss_coef router_z_loss_coef router_jitter_noise z_loss_coefficient
        aux_loss_alpha seq_aux moe_shared_expert_overlap ep_size time_step_min time_step_max time_step_floor
        time_step_rank mamba_dt_min mamba_dt_max mamba_dt_init_floor pretraining_tp
        """,
    "Lengths of the training or of the tokenizer, beside max_position_embeddings.": """
        seq_length max_sequence_length model_max_length tokenizer_model_max_length max_model_len
        """,
    "Heads that classify, which the models that have one read (`models/classifier.py`).": """
        id2label label2id num_labels problem_type task_specific_params summary_type summary_use_proj
        summary_activation summary_proj_to_labels
        """,
    "Defaults of sampling in older files; a request's own parameters decide.": """
        do_sample temperature top_k top_p typical_p min_length max_length max_new_tokens num_beams num_beam_groups
        num_return_sequences length_penalty diversity_penalty repetition_penalty encoder_no_repeat_ngram_size
        no_repeat_ngram_size early_stopping bad_words_ids exponential_decay_length_penalty prefix
        remove_invalid_values pruned_heads
        """,
    "Parts of a multimodal checkpoint beside its language model, and the tokens that stand for images or sound.": """
        vision_config audio_config boi_token_id eoi_token_id eoi_token_index boi_token_index boa_token_id
        boa_token_index eoa_token_id eoa_token_index image_token_id image_token_index video_token_id
        video_token_index audio_token_id audio_token_index vision_start_token_id vision_end_token_id vision_token_id
        mm_tokens_per_image vision_soft_tokens_per_image audio_soft_tokens_per_image vision_feature_layer
        language_model_only
        """,
    "A module that predicts further tokens; it is read when it drafts (`models/mtp.py`).": """
        num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings mtp_layers_block_type
        mtp_hybrid_override_pattern index_share_for_mtp_iteration
        """,
}
HARMLESS: dict[str, str] = {key: reason for reason, keys in _HARMLESS_BY_REASON.items() for key in keys.split()}

NOT_SERVED = {
    "dual_chunk_attention_config": "attention over chunks of a long context is not served. Within the length that the "
    "model was trained for (original_max_position_embeddings in it) attention is the ordinary one: set max_model_len "
    "to at most that length and ignore_config_keys=['dual_chunk_attention_config']",
    "is_encoder_decoder": "only decoders are served",
    "add_cross_attention": "only decoders are served",
    "suppress_tokens": "this family has no suppressed tokens here: give logit_bias or bad_words in requests, and set "
    "ignore_config_keys=['suppress_tokens']",
}
