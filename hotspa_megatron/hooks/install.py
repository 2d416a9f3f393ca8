"""Every name of Megatron that is replaced, in one place, and the way back.

Without ``--hotspa-config`` each replacement calls the original and does nothing else. With it, the training loop stays
Megatron's own: only where the step's data and its forward-backward pass come from changes.
"""

from __future__ import annotations

import functools

from hotspa_megatron.hooks import checkpoint_hooks, compat, serving, session, startup, training
from hotspa_megatron.hooks.rank_log import log_every_rank
from hotspa_megatron.hooks.session import patches


def install() -> None:
    """Replace Megatron's names; a second call does nothing.

    Raises ValueError where this Megatron is not supported. Imports megatron.training, so a CPU stand-in comes first.
    """
    if patches.replaced:
        return
    compat.check_version()
    import megatron.training
    from megatron.core import timers
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import arguments as megatron_arguments
    from megatron.training import checkpointing, initialize
    from megatron.training import training as megatrons

    patches.wrap(megatron_arguments, "add_megatron_arguments", startup.add_flag)
    patches.wrap(megatron_arguments, "validate_args", startup.check_flags_first)
    if hasattr(initialize, "validate_args"):  # 0.17 reads the command line there, through a reference of its own
        patches.set(initialize, "validate_args", megatron_arguments.validate_args)
    patches.wrap(megatrons, "pretrain", startup.remember_forward_step)
    # Scripts import it from the package, which took its own reference.
    patches.set(megatron.training, "pretrain", megatrons.pretrain)
    # Inside initialize_megatron: 0.17 knows its arguments only there.
    patches.wrap(initialize, "_initialize_distributed", startup.plan_before_and_create_groups_after)
    patches.wrap(megatrons, "setup_model_and_optimizer", startup.build_guests_after)
    patches.wrap(checkpointing, "read_metadata", checkpoint_hooks.read_an_empty_tracker)
    patches.wrap(checkpointing, "check_checkpoint_args", checkpoint_hooks.count_samples_of_this_job)
    patches.wrap(megatrons, "load_checkpoint", checkpoint_hooks.move_schedule_with_the_count)
    patches.wrap(megatrons, "build_train_valid_test_data_iterators", serving.read_documents_on_every_rank)
    patches.wrap(megatrons, "build_train_valid_test_datasets", serving.ask_provider_once)
    patches.wrap(megatrons, "build_pretraining_data_loader", serving.serve_steps)
    patches.wrap(megatrons, "train_step", training.train_under_several_strategies)
    patches.wrap(megatrons, "train_step", log_every_rank)
    patches.wrap(megatrons, "dummy_train_step", training.skip_one_step)
    # What people see: our part of Megatron's line about an iteration, of its writers and of its timers.
    patches.wrap(megatrons, "training_log", training.log_steps)
    patches.wrap(megatrons, "print_rank_last", training.complete_line)
    patches.wrap(timers.Timers, "log", training.show_timers)
    patches.wrap(timers.Timers, "write", training.show_timers)
    patches.wrap(megatrons, "train", training.watch_and_end_reports)
    # Where a rank is, for the watchdog, and what is said when it does not get on.
    patches.wrap(schedules, "forward_step", functools.partial(training.noting, "forward"))
    patches.wrap(schedules, "backward_step", functools.partial(training.noting, "backward"))
    patches.wrap(megatrons, "save_checkpoint", checkpoint_hooks.replace_only_what_is_saved)
    patches.wrap(megatrons, "maybe_finalize_async_save", checkpoint_hooks.say_why_not_finished)
    patches.wrap(megatrons, "load_checkpoint", checkpoint_hooks.say_why_not_loaded)


def uninstall() -> None:
    """Restore every replaced name, those replaced while a job ran included."""
    startup.forget()
    session.end()


def replaced() -> tuple[str, ...]:
    """The names that stand replaced now."""
    return patches.replaced
