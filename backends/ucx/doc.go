// SPDX-License-Identifier: Apache-2.0

// Package ucx moves bytes between hosts over the network transports that UCX finds: RDMA, TCP.
//
// It reaches a peer of the same host as any other, over the network. It uses none of UCX's
// transports that share memory: on one host the shm backend copies once and costs less.
//
// Bytes are copied into messages: UCX never reads or writes memory of the program. The data path,
// its threads and the messages with data are package csrc/ucx's. This package has the control
// messages, which one goroutine handles; it starts a task for what may take time.
//
// # What arrives and what leaves
//
//   - initiator.go: our end of a connection that we began. Connect says hello to the owner's
//     control goroutine, again and again until it is welcomed or refused. Import asks the owner
//     what a token opens. Submit hands a batch to C. Close drains, says bye, and waits until the
//     owner has ended its end.
//   - owner.go: our end of a connection that a peer began. A hello is admitted, connected back and
//     welcomed; an import is answered with the ticket of the memory; a bye ends it.
//   - memory.go: a registration, which C knows by its key, its bounds and its ticket.
//   - control.go: the control goroutine, and which end a message is for.
//   - poll.go: completions and notifications, from rings that C fills.
//   - wire.go: the bytes of control messages and of addresses. Nothing in them is believed.
//   - examine.go: what UCX has on this machine, for the tool; explain.go: what it chose for a peer.
//
// # What is proved
//
// The owner's own thread lands what is written, after it has compared the ticket that each message
// shows, and how old the message is. So the proof that nothing lands later is local to the owner,
// whatever a network still holds:
//
//   - A revoke (proof.go) first ends the ticket, so that no message is admitted to the memory any
//     more. Then it waits until each worker's lock was had once: a thread that had admitted a
//     message before holds that until the bytes have landed. It waits for no peer, but it has no
//     proof while a thread stands in a page that does not come.
//   - A batch ends when the owner has answered for it. Where the owner does not, it ends once the
//     owner would ask before it lands the bytes, and we do not answer: each message is at most as
//     old as the larger Grace of both sides when it lands unasked (csrc/ucx, ages.c). The word
//     of the owner's C that its end is over ends it at once.
//   - silence.go gives up a peer whose host acknowledges nothing for Config.Failure while something
//     waits for it. That a process is silent proves nothing, and gives up none.
//
// Backend.Close closes peers, which lets what is under way into our own memory end, ends the epoch
// of every memory, looks for all proofs, and then gives back what others have to us. While a thread
// of ours stands in a page that does not come, the close of a peer may wait for it, and until then
// no epoch ends by Close. Who cannot wait for that revokes the memory first, or beside it.
//
// Against a hostile peer only tokens protect: it can claim to be another backend.
package ucx
