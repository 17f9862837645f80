// SPDX-License-Identifier: Apache-2.0

// Package proc has what concerns processes and threads.
//
//   - Event and Waiter let a goroutine sleep on a descriptor without holding a thread. A goroutine
//     that calls read(2) on an eventfd holds a thread of the operating system; one that waits here
//     is parked in the runtime's poller, so thousands may wait. An Event is an eventfd that is
//     signalled and waited for, a Waiter watches any other descriptor that becomes readable.
//   - ID and Host name processes and hosts, so that another process can tell whether it means the
//     same one; Remote is the process behind a socket, Threads those of a process.
//   - StartChild runs a part of a command as a process of its own: the command starts itself again
//     under a hidden name and speaks with its children in JSON lines over inherited pipes. A child
//     ends when its parent does, whatever ends the parent: the kernel kills it (PR_SET_PDEATHSIG),
//     and its control pipe closes. A parent leaves no child behind: Stop closes the pipe, waits,
//     kills, and reaps.
package proc
