"""Faults in adapters: answers of another adapter, or of one that was not trained so; hostile files that are read."""

from tests.faults.fault import Fault

ADAPTERS = "checkpoints_convert/adapters/"
MERGE = "tests/checkpoints_convert/adapters/test_merge.py::"
READ = "tests/checkpoints_convert/adapters/test_read.py::"
REFUSED = "tests/checkpoints_convert/adapters/test_refusals.py::"
SAVED = "tests/checkpoints_convert/adapters/test_save.py::"
WRITTEN = "tests/checkpoints_convert/adapters/test_checkpoint.py::"
SERVED = "tests/server/test_adapters.py::"

COMPUTED = (
    Fault(
        "adapters/a-stabilized-scale-is-divided-by-the-rank",
        ADAPTERS + "config.py",
        "alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)",
        "alpha / rank",
        (MERGE + "test_a_stabilized_scale_is_by_the_root_of_the_rank", READ + "test_rank_and_scale"),
        "rank-stabilized adapters hardly change their base",
    ),
    Fault(
        "adapters/magnitudes-are-factors",
        ADAPTERS + "merge.py",
        "(pair.magnitude.astype(np.float32) / lengths)",
        "pair.magnitude.astype(np.float32)",
        (MERGE + "test_a_merged_weight_is_the_papers[llama-ends0-dora]",),
        "merged DoRA adapters answer nonsense",
    ),
    Fault(
        "adapters/columns-of-b-are-one-expert-after-the-other",
        ADAPTERS + "read.py",
        "b.reshape(b.shape[0], -1, count).transpose(2, 0, 1)",
        "b.reshape(b.shape[0], count, -1).transpose(1, 0, 2)",
        (MERGE + "test_all_experts_in_one_parameter",),
        "each expert has columns of the others",
    ),
    Fault(
        "adapters/the-first-parameter-is-the-outermost",
        ADAPTERS + "read.py",
        "enumerate(reversed(wrapped))",
        "enumerate(wrapped)",
        (MERGE + "test_all_experts_in_one_parameter",),
        "adapters of experts do not open, or change the wrong matrices where these are square",
    ),
    Fault(
        "adapters/a-tied-head-follows-a-saved-embedding",
        ADAPTERS + "read.py",
        "not is_own and not is_copy",
        "not is_own",
        (MERGE + "test_saved_modules_stand_in_place_of_the_bases",),
        "an adapter whose input embedding was trained has another head than in training",
    ),
    Fault(
        "adapters/patterns-match-anywhere",
        ADAPTERS + "patterns.py",
        'rf"(.*\\.)?({pattern})$"',
        'rf"(.*)?({pattern})$"',
        (READ + "test_rank_and_scale", "tests/checkpoints_convert/adapters/test_patterns.py"),
        "alphas of other modules scale a pair",
    ),
)

KEPT_APART = (
    Fault(
        "adapters/scales-are-not-in-the-fingerprint",
        "jaxinfer/models/adapter.py",
        '_add(digest, "low_rank", name, float(pair.scale).hex())',
        '_add(digest, "low_rank", name)',
        (READ + "test_the_fingerprint_changes_with_every_setting_that_matters",),
        "an adapter reads the cached keys of one with another scale",
    ),
    Fault(
        "adapters/unknown-fields-are-ignored",
        ADAPTERS + "config.py",
        'value is None or value is False or value in ("", [], {})',
        "value is None or name not in _REFUSED",
        (REFUSED + "test_a_configuration_is_refused_before_tensors_are_opened",),
        "adapters of a method that PEFT adds next are served as plain ones",
    ),
    Fault(
        "adapters/values-are-not-looked-at",
        ADAPTERS + "read.py",
        "        check_finite(self.file.path, stored, count_nonfinite(array), array.size)\n",
        "",
        (REFUSED + "test_hostile_tensors_give_one_clear_error",),
        "a NaN in an adapter ends the requests of all who use it",
    ),
    Fault(
        "adapters/links-are-followed-anywhere",
        ADAPTERS + "read.py",
        "    check_inside(folder, names)\n",
        "",
        (REFUSED + "test_links_out_of_the_folder_are_refused",),
        "a folder that is loaded over HTTP reads other files of the machine",
    ),
    Fault(
        "adapters/experts-are-written-by-rank",
        ADAPTERS + "save.py",
        "pair.b.transpose(2, 1, 0)",
        "pair.b.transpose(2, 0, 1)",
        (SAVED + "test_experts_in_one_are_named_as_peft_nests_them",),
        "PEFT and vLLM give each expert columns of the others",
    ),
)

CONVERTED = (
    Fault(
        "adapters/another-adapter-resumes-a-merge",
        ADAPTERS + "checkpoint.py",
        "self.source.fingerprint(), self.adapter.fingerprint, ",
        "self.source.fingerprint(), ",
        (WRITTEN + "test_an_interrupted_merge_resumes_with_the_same_adapter_only",),
        "a merge that is repeated after a retraining has the first layers of the old adapter",
    ),
    Fault(
        "adapters/a-merged-model-keeps-the-bases-template",
        ADAPTERS + "checkpoint.py",
        "        if _has_template(own):\n",
        "        if False:\n",
        (WRITTEN + "test_the_tokenizer_and_template_of_an_adapter_replace_those_of_the_base",),
        "a merged model is prompted in the base's form, not in that of its training",
    ),
    Fault(
        "adapters/weights-are-cast-before-the-sum",
        ADAPTERS + "checkpoint.py",
        'dtype=dtype if dtype == "auto" else "float32"',
        "dtype=dtype",
        (WRITTEN + "test_weights_are_rounded_once",),
        "small changes of an adapter are lost in a cast model",
    ),
    Fault(
        "adapters/any-base-is-merged",
        "checkpoints_convert/convert.py",
        "base_model=base_model or own_name",
        "base_model=base_model",
        (WRITTEN + "test_the_name_of_the_base",),
        "an adapter of another version of a model is merged without a word",
    ),
)

GUARDED = (
    Fault(
        "adapters/any-key-loads",
        "jaxinfer/server/adapter_routes.py",
        "if not record.is_admin:",
        "if not (record.is_admin or record.key):",
        (SERVED + "test_the_routes_need_an_admin_key",),
        "whoever may use the model replaces its adapters",
    ),
    Fault(
        "adapters/an-admin-key-may-be-an-api-key",
        "jaxinfer/server/app.py",
        "        admin_keys.check_apart(keys)\n",
        "        pass\n",
        (SERVED + "test_an_admin_key_is_none_of_the_others",),
        "a key that was given to users loads adapters",
    ),
    Fault(
        "adapters/the-routes-are-always-there",
        "jaxinfer/server/app.py",
        "ADAPTER_ROUTES if options.adapter_routes else ()",
        "ADAPTER_ROUTES",
        (SERVED + "test_without_the_flag_there_are_no_such_routes",),
        "a server whose operator never wanted them has routes that change answers",
    ),
    Fault(
        "adapters/paths-outside-of-the-roots-are-read",
        "jaxinfer/server/folders.py",
        "if any(root in real.parents for root in self._roots) and os.path.isdir(real):",
        "if os.path.isdir(real):",
        (SERVED + "test_folders_outside_of_the_roots_are_not_read",),
        "the route reads any folder of the machine",
    ),
    Fault(
        "adapters/links-out-of-a-root-are-followed",
        "jaxinfer/server/folders.py",
        "real = Path(os.path.realpath(place))",
        "real = Path(os.path.abspath(place))",
        (SERVED + "test_folders_outside_of_the_roots_are_not_read",),
        "a link in the trainer's folder reads others of the machine",
    ),
    Fault(
        "adapters/a-folder-beside-a-root-is-below-it",
        "jaxinfer/server/folders.py",
        "any(root in real.parents for root in self._roots)",
        "any(str(real).startswith(str(root)) for root in self._roots)",
        (SERVED + "test_folders_outside_of_the_roots_are_not_read",),
        "a root named adapters opens adapters-private beside it",
    ),
    Fault(
        "adapters/pipes-are-opened",
        "jaxinfer/server/folders.py",
        "if not stat.S_ISREG(about.st_mode):",
        "if False:",
        (SERVED + "test_hostile_folders_give_one_error_and_load_nothing",),
        "one load waits for ever, and all later ones for it",
    ),
    Fault(
        "adapters/any-size-is-read",
        "jaxinfer/server/folders.py",
        "(limit := self._max_mib[0] << 20)",
        "(limit := self._max_mib[0] << 40)",
        (SERVED + "test_hostile_folders_give_one_error_and_load_nothing",),
        "a file of a terabyte without a byte on the disk ends the server",
    ),
    Fault(
        "adapters/any-key-names-an-adapter",
        "jaxinfer/server/adapters.py",
        "keys is None or record.is_admin or record.key in keys",
        "True",
        (SERVED + "test_adapters_belong_to_the_keys_that_their_load_names",),
        "a tenant is answered by the adapter of another",
    ),
    Fault(
        "adapters/one-in-place-of-another-is-for-all",
        "jaxinfer/server/adapters.py",
        "                    self._keys[adapter] = self._keys[former]\n",
        "                    pass\n",
        (SERVED + "test_adapters_belong_to_the_keys_that_their_load_names",),
        "the next version of a tenant's adapter can be named by all",
    ),
    Fault(
        "adapters/one-is-for-all-until-its-load-has-ended",
        "jaxinfer/server/adapters.py",
        "        if name in self._before:\n            return self._before[name]\n",
        "",
        (SERVED + "test_an_adapter_in_place_of_another_answers_when_it_is_complete",),
        "for a moment after its load all keys can name a tenant's adapter",
    ),
    Fault(
        "adapters/an-answer-changes-adapters-with-the-name",
        "jaxinfer/server/generation.py",
        "self._seconds_left(), salt, self.model.adapter)",
        "self._seconds_left(), salt, self.model.adapter and self.model.adapter.name)",
        (SERVED + "test_a_request_has_the_adapter_that_its_key_may_name",),
        "a request that waits is answered by what another tenant loaded under the name meanwhile",
    ),
    Fault(
        "adapters/metrics-name-all",
        "jaxinfer/server/app.py",
        "lambda adapter: adapters is None or adapters.is_seen(adapter, record)",
        "lambda adapter: True",
        (SERVED + "test_metrics_name_adapters_that_run_and_wait",),
        "a tenant reads the names of the others' adapters",
    ),
    Fault(
        "adapters/a-stream-goes-on-with-another-adapter",
        "jaxinfer/server/models.py",
        'f"{self._base.fingerprint} {self.adapter.identity}"',
        'f"{self._base.fingerprint} {self.adapter.name}"',
        (SERVED + "test_streams_are_those_of_the_adapter_and_are_resumed",),
        "a resumed answer has its end from another version of the adapter",
    ),
    Fault(
        "adapters/a-page-of-another-site-sends-the-password",
        "jaxinfer/server/auth.py",
        "return None if any(name in OF_BROWSERS for name, _ in headers) else password",
        "return password",
        (SERVED + "test_an_admin_key_is_taken_from_a_url_but_not_from_a_browser",),
        "a page that an administrator visits pauses the server",
    ),
)


SLOTS = "jaxinfer/engine/adapter_slots.py"
SCHEDULER = "jaxinfer/engine/scheduler.py"
JOB = "jaxinfer/batch/job.py"
IN_SLOTS = "tests/engine/test_adapter_slots.py::"
SCHEDULED = "tests/engine/test_adapter_scheduling.py::"
STRESSED = "tests/engine/test_adapter_stress.py::test_every_answer_is_that_of_its_adapter[tiny-20-60]"
WARMED = "tests/engine/test_compiling.py::test_warm_up_compiles_what_writes_adapters_and_overwrites_none"
IN_BATCHES = "tests/batch/test_adapters.py::"

SCHEDULED_AND_BATCHED = (
    Fault(
        "adapters/what-runs-makes-room",
        SLOTS,
        "can_go[slot] and not self._num_running.get(slot)",
        "can_go[slot]",
        (IN_SLOTS + "test_what_runs_stays", SCHEDULED + "test_random_work_gives_each_the_answer_of_its_adapter"),
        "a request goes on with the adapter of another one",
    ),
    Fault(
        "adapters/the-most-recently-used-one-makes-room",
        SLOTS,
        "return idle[0] if idle else None",
        "return idle[-1] if idle else None",
        (IN_SLOTS + "test_the_least_recently_used_one_makes_room",),
        "two adapters in use move to the device again and again, while one that nobody uses stays",
    ),
    Fault(
        "adapters/unloading-one-frees-the-slot-of-its-twin",
        SLOTS,
        "self._adapters[slot] is adapter",
        "True",
        (IN_SLOTS + "test_the_same_tensors_under_two_names_share_a_slot_and_outlive_one_of_them",),
        "a pinned adapter leaves the device when the same one is unloaded under another name",
    ),
    Fault(
        "adapters/pinned-ones-never-make-room",
        SLOTS,
        "if needed or not all(map(self._is_pinned, self._adapters)):",
        "if True:",
        (SCHEDULED + "test_where_all_slots_are_pinned_others_run_too",),
        "where all slots are pinned, a request for another adapter waits for ever, and then all others with it",
    ),
    Fault(
        "adapters/moving-ahead-takes-what-is-needed-before",
        SLOTS,
        "self._victim(needed)",
        "self._victim()",
        (IN_SLOTS + "test_moving_ahead_keeps_what_is_needed_before",),
        "adapters move to the device twice",
    ),
    Fault(
        "adapters/slots-are-read-without-the-lock",
        SLOTS,
        "with self._lock:\n            return self.slot_of(adapter) is not None or",
        "if True:\n            return self.slot_of(adapter) is not None or",
        (IN_SLOTS + "test_other_threads_unload_while_the_scheduler_looks",),
        "an engine dies now and then when an adapter is unloaded",
    ),
    Fault(
        "adapters/slots-never-drain",
        SCHEDULER,
        "                if sequence.num_overtaken >= MAX_OVERTAKEN:\n                    break\n",
        "",
        (SCHEDULED + "test_a_stream_of_requests_for_adapters_in_slots_starves_nobody",),
        "a request for an adapter that is in no slot waits as long as others are in demand",
    ),
    Fault(
        "adapters/one-that-was-moved-ahead-stays-after-its-request",
        SCHEDULER,
        "                self.adapters.forget(adapter)  # it may have been moved ahead for this one\n",
        "                pass\n",
        (SCHEDULED + "test_what_was_moved_ahead_leaves_with_a_request_that_ends_before_it_runs",),
        "an adapter that was unloaded keeps its memory and its slot",
    ),
    Fault(
        "adapters/a-taken-slot-is-not-written",
        SCHEDULER,
        "            if is_new:\n",
        "            if False:\n",
        (SCHEDULED + "test_random_work_gives_each_the_answer_of_its_adapter", STRESSED),
        "a request has the answer of the adapter that was in its slot before",
    ),
    Fault(
        "adapters/prefixes-are-kept-by-name",
        "jaxinfer/engine/request.py",
        "adapter = adapter.fingerprint",
        "adapter = adapter.name",
        (STRESSED,),
        "an adapter that is replaced under its name reads the keys of the one before",
    ),
    Fault(
        "adapters/warming-up-overwrites-a-slot",
        "jaxinfer/engine/model_runner.py",
        "self.write_stacks(self.adapters.sizes.num_slots + 1, ",
        "self.write_stacks(1, ",
        (WARMED,),
        "an adapter that was used before warm_up() changes nothing after it",
    ),
    Fault(
        "adapters/the-write-compiles-with-the-first-request",
        "jaxinfer/engine/model_runner.py",
        "                self.write_stacks(self.adapters.sizes.num_slots + 1, adapter)\n",
        "                pass\n",
        (WARMED,),
        "the first request for an adapter waits for a compiler, in a server that was warmed up",
    ),
    Fault(
        "adapters/another-adapter-continues-a-batch",
        JOB,
        "adapters={name: self._adapters[name].identity for name in sorted(named & self._adapters.keys())} or None",
        "adapters=None",
        (IN_BATCHES + "test_a_job_continues_with_the_same_adapters_only",),
        "half of the answers are those of the adapter before it was trained further",
    ),
    Fault(
        "adapters/rows-by-model-do-not-count-for-a-batch",
        JOB,
        "named = self.scan.adapters | self.scan.models.keys()",
        "named = self.scan.adapters",
        (IN_BATCHES + "test_rows_whose_model_became_an_adapter_are_of_another_job",),
        "rows in OpenAI's form are answered by the base before a resume, and by an adapter after it",
    ),
    Fault(
        "adapters/a-batch-goes-on-with-a-replaced-adapter",
        JOB,
        "in enumerate(inputs):\n                self._check_same(adapter, row)\n",
        "in enumerate(inputs):\n",
        (IN_BATCHES + "test_an_adapter_that_is_replaced_under_the_job_stops_it",),
        "rows of one job have the answers of two adapters",
    ),
    Fault(
        "adapters/an-adapter-that-came-later-is-not-recorded",
        "jaxinfer/batch/ledger.py",
        "            if added:\n                identity.write(self._path_job, model)\n",
        "",
        (IN_BATCHES + "test_rows_that_failed_without_their_adapter_are_tried_again_with_it",),
        "a job that was continued with an adapter can be continued with any other",
    ),
)

LIMITED = "tests/engine/test_adapters.py::test_no_more_are_loaded_than_the_hosts_memory_has_room_for"
IN_FILES = "tests/cli/test_adapters.py::"
ON_THE_COMMAND_LINE = (
    Fault(
        "adapters/null-in-a-line-is-the-adapter-that-answers",
        "jaxinfer/cli/options.py",
        "        adapters.append(name)\n",
        "        adapters.append(name or chosen_adapter(options))\n",
        (IN_FILES + "test_lines_of_a_file_name_their_adapters", IN_FILES + "test_lines_of_scores_name_their_adapters"),
        "a comparison of an adapter with its base in one file compares it with itself",
    ),
    Fault(
        "adapters/an-unknown-name-in-a-file-waits-for-the-model",
        "jaxinfer/cli/options.py",
        'not in names:\n            raise UsageError(f"{where}: adapter',
        'not in names and not names:\n            raise UsageError(f"{where}: adapter',
        (IN_FILES + "test_an_adapter_that_is_not_known_is_refused_before_the_model_is_loaded",),
        "a typing error in a line is told after the minutes that a large model takes to load, and without its number",
    ),
)

SHOWN = (
    Fault(
        "adapters/a-refused-configuration-is-shown-as-served",
        "checkpoints_convert/adapters/facts.py",
        "        refused += error.problems\n",
        "        pass\n",
        (
            "tests/checkpoints_convert/adapters/test_facts.py::test_what_is_refused_is_told_beside_the_facts",
            IN_FILES + "test_show_tells_what_an_adapter_is",
        ),
        "an adapter that no command takes is shown as one that can be served",
    ),
    Fault(
        "adapters/show-does-not-try-the-base",
        "jaxinfer/cli/store.py",
        "            check_served(adapter, config)\n",
        "            pass\n",
        (IN_FILES + "test_show_tells_what_an_adapter_is",),
        "an adapter that is only merged is shown as one that can be served",
    ),
)

WATCHED = (
    Fault(
        "adapters/ps-shows-no-adapters",
        "jaxinfer/cli/served.py",
        'if model.get("parent") is not None]',
        "if False]",
        ("tests/cli/test_serve.py::test_ps_shows_adapters",),
        "an administrator does not see which adapters a server has",
    ),
    Fault(
        "adapters/host-bytes-count-adapters-on-the-device-only",
        "jaxinfer/server/metrics.py",
        "adapter.host.num_bytes for adapter in loaded)",
        "adapter.host.num_bytes for s in self.schedulers for adapter in s.adapters.resident)",
        (SERVED + "test_metrics_name_adapters_that_run_and_wait",),
        "the host's memory is full of adapters, and the dashboard shows those of the device",
    ),
)

IN_THE_HOSTS_MEMORY = (
    Fault(
        "adapters/the-limit-is-checked-before-the-lock-only",
        "jaxinfer/engine/adapters.py",
        "            self.check_new(name, replace=replace)  # others may have been loaded meanwhile\n",
        "",
        (LIMITED,),
        "two loads at once exceed the limit, or replace each other unasked",
    ),
    Fault(
        "adapters/one-that-replaces-another-counts-twice",
        "jaxinfer/engine/adapters.py",
        "if name not in self._loaded and self.max_loaded is not None",
        "if self.max_loaded is not None",
        (LIMITED,),
        "a trainer at the limit cannot replace its adapter by the next version",
    ),
    Fault(
        "adapters/too-many-is-an-error-of-the-folder",
        "jaxinfer/server/adapters.py",
        "            except TooManyAdaptersError as error:\n"
        '                raise APIError(400, str(error), param=_NAME, code="too_many_adapters") from error\n',
        "",
        (SERVED + "test_no_more_adapters_are_loaded_than_may_be",),
        "a trainer cannot tell that it has to unload one from a folder that is broken",
    ),
)

STACKED, ADDED = "tests/engine/test_adapter_stacks.py::", "tests/engine/test_added_tokens.py::"
SERVED_TOGETHER = (
    Fault(
        "adapters/heads-have-the-changes-of-all-slots",
        "jaxinfer/quantization/adapted.py",
        "inner = jnp.where(is_own[..., None, :, None], inner, 0)",
        "inner = jnp.where(is_own[..., None, :, None] | True, inner, 0)",
        (STACKED + "test_latent_attention_and_experts",),
        "latent attention of a request has the changes of every adapter on the device",
    ),
    Fault(
        "adapters/experts-have-the-changes-of-the-first",
        "jaxinfer/quantization/adapted.py",
        "(ids - 1) * count + expert + 1",
        "(ids - 1) * count + 1",
        (STACKED + "test_latent_attention_and_experts",),
        "all experts of an adapter have the pair of its first expert",
    ),
    Fault(
        "adapters/logits-of-trained-tokens-are-those-of-the-next",
        "jaxinfer/quantization/adapted_tables.py",
        "jnp.where(tokens > 0, tokens - 1, width)",
        "jnp.where(tokens > 0, tokens, width)",
        (STACKED + "test_embedding_and_head[untied]",),
        "a trained token's logit stands at the token after it",
    ),
    Fault(
        "adapters/heads-of-others-stand-for-none",
        "jaxinfer/quantization/adapted_tables.py",
        "(ids == slot + 1) & stack.is_whole[slot]",
        "ids == slot + 1",
        (STACKED + "test_embedding_and_head[untied]",),
        "where one adapter has a head of its own, the logits of all others are 0",
    ),
    Fault(
        "adapters/tables-outlive-their-adapter",
        "jaxinfer/engine/adapter_stacks.py",
        'return TableStacks(without(tables.embed, "b"), without(tables.lm_head, "a"))',
        "return tables",
        (STACKED + "test_tables_of_the_adapter_before_are_cleared[tied]",),
        "an adapter has the trained tokens of the one that was in its slot before",
    ),
    Fault(
        "adapters/everyone-writes-added-tokens",
        "jaxinfer/quantization/adapted_tables.py",
        "is_own = (ids > 0)[..., None] & (jnp.arange(own.shape[-1]) < stack.num_added[slots][..., None])",
        "is_own = jnp.arange(own.shape[-1]) < stack.num_added[slots][..., None]",
        (ADDED + "test_others_have_their_bits_and_never_an_added_token",),
        "requests without an adapter answer with tokens that the adapter in the first slot adds",
    ),
    Fault(
        "adapters/added-tokens-outlive-their-adapter",
        "jaxinfer/engine/adapter_stacks.py",
        '(*names, "columns", "tokens", "is_whole", "num_added")',
        '(*names, "columns", "tokens", "is_whole")',
        (ADDED + "test_an_adapter_without_them_is_cleared_of_those_before",),
        "an adapter writes the added tokens of the one that was in its slot before",
    ),
    Fault(
        "adapters/a-cap-makes-tokens-possible",
        "jaxinfer/models/modules.py",
        "scaled = jnp.where(jnp.isneginf(logits), logits, scaled)",
        "scaled = jnp.where(jnp.isnan(logits), logits, scaled)",
        (ADDED + "test_others_have_their_bits_and_never_an_added_token",),
        "models that cap their logits answer with tokens that only others' adapters have",
    ),
    Fault(
        "adapters/every-prompt-may-have-added-tokens",
        "jaxinfer/engine/client.py",
        "        return self.with_tokens(adapter.tokenizer, adapter.num_added)",
        "        return self.with_tokens(adapter.tokenizer, 3)",
        (ADDED + "test_others_have_their_bits_and_never_an_added_token",),
        "a prompt has tokens that its adapter has no vector of",
    ),
    Fault(
        "adapters/a-client-brings-a-template",
        "jaxinfer/server/adapters.py",
        '"uses_tokenizer": False',
        '"uses_tokenizer": True',
        (SERVED + "test_a_template_in_a_folder_is_not_rendered",),
        "templates that were loaded over HTTP render the prompts of others",
    ),
    Fault(
        "adapters/queries-are-scaled-by-no-magnitudes",
        "jaxinfer/models/layers.py",
        "x = weight.scaled(x) if is_transposed and isinstance(weight, AdaptedHeads) else x",
        "x = x if is_transposed and isinstance(weight, AdaptedHeads) else x",
        (STACKED + "test_latent_attention_and_experts",),
        "DoRA of kv_b_proj changes values and not keys",
    ),
    Fault(
        "adapters/experts-on-a-mesh-have-the-pairs-of-the-first",
        "jaxinfer/models/experts.py",
        "pairs, whole = PartitionSpec(None, axis), PartitionSpec()",
        "pairs, whole = PartitionSpec(), PartitionSpec()",
        (STACKED + "test_experts_on_a_mesh_have_the_tokens_of_one_device",),
        "every device takes the adapters of the first experts",
    ),
    Fault(
        "adapters/a-failed-write-counts-as-written",
        "jaxinfer/engine/adapter_slots.py",
        "                self._unwritten.add(slot)\n",
        "                pass\n",
        (IN_SLOTS + "test_an_adapter_that_was_not_written_is_written_next",),
        "after a copy that failed, requests are answered by the adapter that the slot had before",
    ),
    Fault(
        "adapters/invocation-is-ignored",
        "jaxinfer/engine/programs/work.py",
        "positions >= self.adapter_starts[slot]",
        "positions >= 0",
        (STACKED + "test_an_invoked_adapter_starts_at_its_tokens",),
        "an adapter that is invoked late changes the tokens before",
    ),
    Fault(
        "adapters/pages-after-an-invocation-are-shared",
        "jaxinfer/engine/request.py",
        "keys[first:] = [key + mark for key in keys[first:]]",
        "pass",
        (STACKED + "test_an_invoked_adapter_starts_at_its_tokens",),
        "a request reads keys that another adapter made",
    ),
    Fault(
        "adapters/magnitudes-are-over-the-base-alone",
        "jaxinfer/engine/adapter_stacks.py",
        "_dense(params, name) + scale * (",
        "_dense(params, name) + 0 * (",
        (STACKED + "test_linear_layers",),
        "DoRA divides by the lengths of the base's columns",
    ),
    Fault(
        "adapters/trained-biases-are-added-to-the-bases",
        "jaxinfer/engine/adapter_stacks.py",
        "changed = bias.astype(np.float32) - np.asarray(own, np.float32)",
        "changed = bias.astype(np.float32)",
        (STACKED + "test_linear_layers",),
        "a trained bias is added to the one that it stands in place of",
    ),
    Fault(
        "adapters/changed-tables-are-taken-for-copies",
        "jaxinfer/loading.py",
        "    return np.array_equal(rows.astype(np.float32), (own.T if is_transposed else own).astype(np.float32))",
        "    return True",
        (STACKED + "test_copies_of_the_bases_tables_take_no_room",),
        "a trained embedding is left out, since it has the base's shape",
    ),
    Fault(
        "adapters/drafts-are-as-good-for-every-adapter",
        "jaxinfer/speculative/adaptive.py",
        "        if adapter:\n",
        "        if False:\n",
        ("tests/speculative/test_adaptive.py::test_new_sequences_begin_with_the_rate_of_their_adapter",),
        "an adapter that no draft follows lowers the number of drafts of all requests, and its own is tried again",
    ),
)

FAULTS = (
    *COMPUTED,
    *KEPT_APART,
    *CONVERTED,
    *GUARDED,
    *SCHEDULED_AND_BATCHED,
    *ON_THE_COMMAND_LINE,
    *SHOWN,
    *WATCHED,
    *IN_THE_HOSTS_MEMORY,
    *SERVED_TOGETHER,
)
