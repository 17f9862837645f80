// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"time"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
)

// fabric is what this package needs of a verbs.Context, where each method is
// described. Tests put another one in its place.
type fabric interface {
	Close() error
	Poll(done []verbs.Done) int
	Drive()
	Arm() bool
	Receive() (verbs.Notif, bool)
	News() (verbs.News, bool)
	OpenRail(verbs.RailConfig) (int, error)
	Rail(rail int) (verbs.Rail, error)
	Counters(rail int) (verbs.Counters, error)
	Unmap(key uint32) error
	Grant(key uint32, rail int, at uint64, flags uint32) (remoteKey uint32, err error)
	Revoke(key uint32) error
	Pin(rail int, r verbs.Range, flags uint32) (verbs.Pin, error)
	Map(key uint32, addr, n uint64, pins []verbs.Pin, prefer uint32) error
	connect(initiator bool, credit int) (link, error)
}

// link is a verbs.Conn.
type link interface {
	ID() uint64
	PairMake(pair, rail int) (verbs.End, error)
	PairBegin(pair int, theirs verbs.End) error
	PairEnd(pair int) error
	PairSettle(pair int, seen uint64) error
	Seen() uint64
	Import(m verbs.Import) (slot uint32, err error)
	Drop(slot uint32)
	Expire(slot uint32)
	Submit(tag uint64, b *driver.Batch) error
	Cancel(tag uint64)
	Busy() bool
	Drain(grace time.Duration) error
	End(status int32, proved bool) error
	Close() error
}

// opener makes a fabric: openVerbs but in tests.
type opener func(verbs.Config) (fabric, error)
