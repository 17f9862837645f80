// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"math"

	"github.com/sluicehq/sluice/driver"
)

var canChecks = []check{
	{name: "CanConstant", wirings: everywhere, run: checkCanConstant},
	{name: "CanRefused", wirings: everywhere, run: checkCanRefused},
	{name: "CanNever", wirings: everywhere, run: checkCanNever},
}

func checkCanConstant(s *stage) {
	can := s.peer.Can()
	l, r := s.local(64), s.remote(64)
	s.move(driver.Write, desc(l, 0, r, 0, 64))
	if again := s.peer.Can(); again != can {
		s.Errorf("Can returned %b, then %b: it must be constant", can, again)
	}
	can &^= driver.LastResort // which is no way to submit
	for _, b := range bits {
		can &^= b.can
	}
	if can != 0 {
		s.Errorf("Can has bits %b that the contract does not name", can)
	}
}

// try is a batch with what is wrong with it.
type try struct {
	what  string
	batch driver.Batch
}

// checkCanRefused submits what needs a bit that the Peer lacks.
func checkCanRefused(s *stage) {
	l, r := s.local(4096), s.remote(4096)
	descs := []driver.Desc{desc(l, 0, r, 64, 64)}
	plain := geometry{count: 2, localStride: 64, remoteStride: 64}.pattern(l, r, 64)
	loops, slots := *plain, *plain
	loops.Loops = []driver.Loop{{N: 2, Local: 64, Remote: 64}}
	slots.Remote = driver.Side{Stride: 128, Step: 64, Per: 2}
	for _, o := range []struct {
		bit driver.Can
		try
	}{
		{driver.CanPattern, try{"a pattern", driver.Batch{Op: driver.Write, Pattern: plain}}},
		{driver.CanPattern, try{"a pattern", driver.Batch{Op: driver.Read, Pattern: plain}}},
		{driver.CanPattern, try{"a pattern with a loop", driver.Batch{Op: driver.Write,
			Pattern: &loops}}},
		{driver.CanPattern, try{"a pattern with slots", driver.Batch{Op: driver.Read,
			Pattern: &slots}}},
		{driver.CanNotify,
			try{"a message", driver.Batch{Op: driver.Write, Tail: driver.NotifyTail}}},
		{driver.CanNotify, try{"a message", driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Descs: descs}}},
		{driver.CanDurable, try{"a durable write", driver.Batch{Op: driver.Write, Durable: true,
			Descs: descs}}},
	} {
		if !s.can(o.bit) {
			s.refused("without its bit, "+o.what, driver.ErrNotSupported, s.batching(&o.batch))
		}
	}
	if !s.can(driver.CanNotify) {
		s.noMessages()
	}
	s.compare(l, r, "after batches that the peer cannot take")
	s.move(driver.Write, desc(l, 0, r, 64, 64))
	s.compare(l, r, "after a good batch among those")
}

// noMessages looks at what a backend answers whose peers carry no notifications.
func (s *stage) noMessages() {
	s.Helper()
	if n, err := s.near.look(make([]driver.Message, 4)); n != 0 || err != nil {
		s.Errorf("Receive of a backend without notifications: %d, %v", n, err)
	}
	if err := s.near.b.Answer(1, []byte("x")); err == nil {
		s.Error("Answer of a backend without notifications: no error")
	}
}

// checkCanNever submits what no bit makes legal: see driver.Batch.Check.
func checkCanNever(s *stage) {
	l, r := s.local(4096), s.remote(4096)
	descs := []driver.Desc{desc(l, 0, r, 64, 64)}
	plain := geometry{count: 2, localStride: 64, remoteStride: 64}.pattern(l, r, 64)
	for _, o := range []try{
		{"neither a read nor a write", driver.Batch{Descs: descs}},
		{"an unknown operation", driver.Batch{Op: 3, Descs: descs}},
		{"an unknown operation", driver.Batch{Op: math.MaxUint8, Descs: descs}},
		{"a read with a message", driver.Batch{Op: driver.Read, Tail: driver.NotifyTail,
			Descs: descs}},
		{"an unknown tail", driver.Batch{Op: driver.Write, Tail: driver.NotifyTail + 1,
			Descs: descs}},
		{"a durable read", driver.Batch{Op: driver.Read, Durable: true, Descs: descs}},
		{"a durable message", driver.Batch{Op: driver.Write, Durable: true, Tail: driver.NotifyTail,
			Descs: descs}},
		{"descriptors and a pattern", driver.Batch{Op: driver.Write, Descs: descs, Pattern: plain}},
		{"nothing to write", driver.Batch{Op: driver.Write}},
		{"nothing to read", driver.Batch{Op: driver.Read}},
	} {
		s.refused(o.what, o.batch.Check(math.MaxUint8), s.batching(&o.batch))
	}
	s.compare(l, r, "after batches that are never legal")
}
