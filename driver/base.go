// SPDX-License-Identifier: Apache-2.0

package driver

// BackendBase is for a Backend to embed: the answers of one whose Peers carry no
// notifications. Only answers that are true of such a backend stand here.
type BackendBase struct{}

// Receive has nothing.
func (BackendBase) Receive([]Message) (int, error) { return 0, nil }

// Answer is ErrNotSupported.
func (BackendBase) Answer(uint64, []byte) error { return ErrNotSupported }

// PeerBase is for a Peer to embed: the answers of one without notifications that needs no
// help and cannot be lost.
type PeerBase struct{}

// Conn is 0: no message comes by it.
func (PeerBase) Conn() uint64 { return 0 }

// Help has done nothing.
func (PeerBase) Help(uint64, <-chan struct{}) bool { return false }

// Lost is never closed.
func (PeerBase) Lost() <-chan struct{} { return nil }
