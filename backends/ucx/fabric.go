// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"time"

	"github.com/sluicehq/sluice/csrc/ring"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// fabric is what this package needs of a ucp.Context, where each method is
// described. Tests put another one in its place.
type fabric interface {
	Close() error
	Address(worker int) []byte
	Poll(done []ring.Done) int
	Drive()
	Arm() bool
	Receive() (ucp.Notif, bool)
	Control() (ucp.Control, bool)
	Map(key uint32, m ucp.Memory) error
	Revoke(key uint32, limit time.Duration) error
	connect(worker int, address []byte) (link, error)
}

// link is a ucp.Conn.
type link interface {
	ID() uint64
	Bind(peer, grace uint64)
	Control(msg []byte) error
	Lanes() string
	Import(m ucp.Import) (slot uint32, err error)
	Drop(slot uint32)
	Submit(tag uint64, b *driver.Batch) error
	Notify(msg []byte) error
	Cancel(tag uint64)
	Help(tag uint64, stop <-chan struct{}) bool
	Drain(grace time.Duration) error
	End(status int32, proven bool)
	Silence() (heard, waited time.Duration)
	GiveUp()
	Close(grace time.Duration) error
}

// opener makes a fabric: openUCX but in tests.
type opener func(ucp.Config) (fabric, error)
