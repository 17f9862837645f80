// SPDX-License-Identifier: Apache-2.0

// Package session has what backends share that keep connections to peers, and how two engines meet
// over a stream.
//
//   - admission.go. Lobby admits strangers: connections that have been accepted and whose handshake
//     has not completed. A listener that refuses new connections while too many are silent can be
//     shut to all peers by a few silent ones, and one that admits all can be made to hold any
//     number. A Lobby has places, of which one host has at most half. The connections that find
//     none wait, in order of arrival. While some wait, one that has a place and keeps silent is
//     closed for the next after HandshakeMin. HostCount bounds what peers hold behind it.
//   - memory.go. KeyTable, Imports and Token are what memory is known by: the small numbers that
//     descriptors name it with, whose epochs go on when a number is used again, and the tokens
//     that peers show. ContextLock is held by the call that looks for the proof of a revoke.
//   - message.go. MessageReader reads what peers say to each other beside the data, which may be
//     anything; Status is how an owner answers.
//   - codec.go. Codec encodes and decodes control messages and the addresses of backends, each by
//     one function that names the fields in order.
//   - inbox.go. Inbox and Sender carry notifications between backends of one process, each after
//     the bytes that it belongs to.
//   - completions.go. Completions holds the completions of a backend until Poll takes them;
//     LastWords, which connections have ended that the program has yet to hear of.
//   - silence.go. Outbound and SilenceWatch tell a host that is gone from a process that is late.
//     The kernel of a live host acknowledges also what its process does not read because it is
//     stopped or kept off its processors; a host that acknowledges nothing for a while is down, or
//     out of reach.
//   - stream.go, listen.go. StreamPolicy checks who is at the other end of a stream, before two
//     engines exchange descriptions over it, in frames; Listen replaces the socket that a killed
//     program has left.
//   - gate.go. Gate keeps what is about to be closed until no call uses it any more, and Tasks
//     waits for goroutines. SetDefault, DefaultSpin and CheckWithin fill in and check the fields of
//     a Config.
package session
