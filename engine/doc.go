// SPDX-License-Identifier: Apache-2.0

// Package engine is the public API of sluice. A program opens one Engine, names the memory that it
// registers, meets its peers, and posts one-sided reads and writes as Transfers. Which backend
// moves the bytes is a Route, chosen by the kinds of memory, by where the peer is and by cost, and
// explained by Explain. Package engine is pure Go and knows the contract of package driver, no
// backend.
//
// # What a program calls
//
//	Open                          with backends, which are the engine's from then on
//	Engine.Register               memory, under a name; Engine.Alloc gives memory that suits
//	Engine.Serve, Engine.Dial     two engines meet over a stream, and prove who they are; or
//	Engine.Describe, Connect      over any channel that the program trusts
//	Peer.Remote, Peer.Import      a region of the peer by its name, or by the token of a Lease
//	Engine.NewTransfer            once for each list of copies
//	Transfer.Add, AddPages,
//	AddPattern, Notify            what is to move, and the message that follows it
//	Transfer.Post, Wait, Err      as often as wanted
//	Engine.Notifications          what peers have sent
//	Lease.Revoke, Transfer.Abort  end what is under way, with a proof
//	Engine.Close                  ends all of it
//
// # Who owns what
//
// The engine owns its backends, and closes them. The program owns memory: it must stay mapped until
// its Region is closed. Bytes that are listed belong to the transfer from Post until it is done,
// and after an outcome that is unproven for good. Lists of a Pattern and messages are kept by
// reference until Reset.
//
// Except where a type says otherwise, all methods may be called from any goroutine. A Transfer
// belongs to one goroutine at a time, but for Done, Err, Wait, Abort and Completed.
//
// # Which goroutines run
//
// One for each backend (lane.serve): it polls for completions and messages, and sleeps on the
// backend's descriptor. Goroutines that post, wait or call Next poll as well, and those of a
// backend that is a driver.Reaper, so that a small transfer needs no wake-up. One for each
// connection waits for its loss (conn.watch). Chains have one for each peer that is reached by
// them, and two for each that reaches this engine so (loop.run, stager.openWindow). With
// Config.Schedule one submits what waits for its turn, and ends what has not begun by its deadline
// (scheduler.serve). Timers end transfers that are late (sweeper) and leases whose time is over.
// Config.OnPeer, OnRefused and Transfer.OnDone say from which goroutine they are called.
//
// # Errors
//
// Misuse is returned by the call: ErrBusy, ErrBounds, ErrClosed, ErrFull, ErrNoRoute. What happens
// on the way is the outcome of a transfer, Err: ErrPeerLost, ErrRevoked, ErrTimeout, ErrAborted,
// ErrFault. An outcome that was told never changes. ErrUnproven, of Abort, Revoke or Close, says
// that bytes may land still. All match by errors.Is; an OpError names operation, backend and peer.
//
// # Which file to read
//
//	post.go, state.go              a post from Post to its outcome; the word that holds its state
//	list.go, wait.go, deadline.go  what is listed; waiting for it; ending it early
//	lane.go, backlog.go            a backend at work; posts that wait for room
//	schedule.go, scheduler.go      classes of transfers; what less urgent ones wait for
//	region.go, lease.go            memory, and the revoke of it
//	connect.go, serve.go           how a Peer comes about
//	peer.go, remote.go, route.go   what it reaches, and by which backend
//	notify.go, senders.go          messages, and the connections that they come by
//	chain*.go                      Staged: chains of backends through memory of the engine
package engine
