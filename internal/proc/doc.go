// SPDX-License-Identifier: Apache-2.0

// Package proc has what concerns processes and threads.
//
//   - An Event lets a goroutine sleep on an eventfd without holding a thread. A goroutine that
//     calls read(2) on an eventfd holds a thread of the operating system; one that waits here is
//     parked in the runtime's poller, so thousands may wait.
//   - Remote is the process behind a socket, of which it learns the end; Threads are those of a
//     process. Host names a host, so that another process can tell whether it means the same one.
//   - StartChild runs a part of a command as a process of its own: the command starts itself again
//     under a hidden name and speaks with its children in JSON lines over inherited pipes. A child
//     ends when its parent does, whatever ends the parent: the kernel kills it (PR_SET_PDEATHSIG),
//     and its control pipe closes. A parent leaves no child behind: Stop closes the pipe, waits,
//     kills, and reaps.
package proc
