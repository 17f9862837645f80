// SPDX-License-Identifier: Apache-2.0

package driver

// BackendBase is for a Backend to embed whose Peers carry no notifications. It implements the
// methods that only notifications need.
type BackendBase struct{}

// Receive returns no messages.
func (BackendBase) Receive([]Message) (int, error) { return 0, nil }

// Answer returns ErrNotSupported.
func (BackendBase) Answer(uint64, []byte) error { return ErrNotSupported }

// PeerBase is for a Peer to embed that carries no notifications, needs no Help and cannot be lost.
type PeerBase struct{}

// Conn returns 0: no message arrives by this connection.
func (PeerBase) Conn() uint64 { return 0 }

// Help does nothing.
func (PeerBase) Help(uint64, <-chan struct{}) bool { return false }

// Lost returns a channel that is never closed.
func (PeerBase) Lost() <-chan struct{} { return nil }
