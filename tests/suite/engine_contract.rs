//! One suite for every engine: what the trait promises, what the queue makes of it, and that both
//! hold on a failing disk. An engine that this machine does not have is skipped, with a message.

#[cfg(debug_assertions)] // the seam exists in these builds only
mod failed;
mod faults;
mod queue;
mod raw;
mod setup;
mod tokio_uring;
mod uring;

use setup::Setup;

/// Runs each case over each engine.
macro_rules! contract {
    ($($engine:ident),* => $room:ident { $($case:ident),* $(,)? }) => {
        contract!(@each [$($engine)*] $room [$($case)*]);
    };
    (@each [] $room:ident $cases:tt) => {};
    (@each [$engine:ident $($rest:ident)*] $room:ident [$($case:ident)*]) => {
        mod $engine {
            $(
                #[test]
                fn $case() {
                    if let Some(setup) = crate::engine_contract::Setup::$engine() {
                        crate::engine_contract::$room::$case(&setup);
                    }
                }
            )*
        }
        contract!(@each [$($rest)*] $room [$($case)*]);
    };
}

mod engine {
    contract!(
        portable_buffered, portable_direct, uring_fixed_direct, uring_direct, uring_fixed_buffered,
        tokio_uring_fixed_direct, tokio_uring_direct, tokio_uring_fixed_buffered
        => raw {
            what_is_written_is_read,
            as_many_operations_as_the_depth_complete_at_once,
            a_read_at_the_end_of_the_file_is_short,
            a_sync_completes,
            writing_to_a_read_only_file_is_ebadf,
            an_unknown_file_fails_the_operation,
            bytes_outside_the_buffer_fail_the_operation,
            a_full_device_is_enospc,
            a_waker_ends_the_wait_from_any_thread,
            dropping_the_engine_gives_back_every_buffer,
            file_numbers_are_used_again,
            more_files_than_a_table_holds_can_be_attached,
        }
    );
}

mod to_nowhere {
    contract!(
        null => raw {
            a_sync_completes,
            an_unknown_file_fails_the_operation,
            bytes_outside_the_buffer_fail_the_operation,
            a_waker_ends_the_wait_from_any_thread,
            dropping_the_engine_gives_back_every_buffer,
            writes_to_nowhere_leave_the_file_and_reads_give_zeros,
        }
    );
}

mod queued {
    contract!(
        portable_buffered, portable_direct, uring_fixed_direct, uring_direct, uring_fixed_buffered,
        tokio_uring_fixed_direct, tokio_uring_direct, tokio_uring_fixed_buffered
        => queue {
            many_more_requests_than_the_depth_all_complete,
            a_file_shorter_than_needed_is_an_unexpected_end,
            a_misaligned_direct_transfer_is_refused_on_any_file_system,
            an_aborted_request_is_cancelled_without_io,
            a_file_is_closed_after_the_requests_submitted_before,
            dropping_the_queue_finishes_what_was_submitted,
            a_reply_may_submit_the_next_request,
            a_trial_tells_whether_a_file_takes_transfers,
            more_files_than_the_depth_are_synced_at_the_same_time,
        }
    );
}

#[cfg(debug_assertions)]
mod failed_calls {
    contract!(
        portable_buffered, portable_direct, uring_fixed_direct, uring_fixed_buffered,
        tokio_uring_fixed_direct, tokio_uring_fixed_buffered
        => failed {
            errors_surface_unchanged,
            a_sync_that_fails_among_others_is_its_own_files,
        }
    );
}

mod failing {
    contract!(
        portable_buffered, portable_direct, uring_fixed_direct, uring_fixed_buffered,
        tokio_uring_fixed_direct, tokio_uring_fixed_buffered
        => faults {
            short_interrupted_and_reordered_transfers_give_the_same_file,
            what_is_interrupted_for_ever_fails_in_the_end,
            a_broken_engine_answers_every_request,
        }
    );
}

mod short {
    contract!(null => faults { what_the_system_is_short_for_waits_for_a_completion });
}
