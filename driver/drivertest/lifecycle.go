// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var lifecycleChecks = []check{
	{name: "Caps", wirings: Self, run: checkCaps},
	{name: "Register", wirings: Self, run: checkRegister},
	{name: "Reverse", wirings: Pair | Processes, run: checkReverse},
	{name: "CloseTwice", wirings: everywhere, meets: true, run: checkCloseTwice},
	{name: "Churn", wirings: everywhere, meets: true, run: checkChurn},
	{name: "Lost", wirings: everywhere, meets: true, run: checkLost},
	{name: "Explain", wirings: Self, run: checkExplain},
}

func checkCaps(s *stage) {
	c := s.caps
	if again := s.near.b.Caps(); again != c {
		s.Errorf("Caps returned %+v, then %+v: it must be constant", c, again)
	}
	for what, wrong := range map[string]bool{
		"Name must be lower case and not empty": c.Name == "" ||
			c.Name != strings.ToLower(c.Name),
		"DescsMax must be at least 1": c.DescsMax < 1,
		"Pairs must not be empty":     c.Pairs.Local() == 0,
		"RunsMax must be over 0 exactly with CanPattern": (c.RunsMax > 0) != s.can(
			driver.CanPattern),
		"MessageMax must be over 0 exactly with CanNotify": (c.MessageMax > 0) != s.can(
			driver.CanNotify),
		"Cost.Rate must be over 0": c.Cost.Rate <= 0,
	} {
		if wrong {
			s.Errorf("Caps %+v: %s", c, what)
		}
	}
	addr := s.near.b.Addr()
	if len(addr) == 0 || len(addr) > driver.AddrMax {
		s.Errorf("Addr of %d bytes, want 1 to %d", len(addr), driver.AddrMax)
	}
	if !bytes.Equal(addr, s.near.b.Addr()) {
		s.Error("Addr must be constant")
	}
	if n, err := s.near.ledger.poll(); n != 0 || err != nil {
		s.Errorf("Poll of an idle backend: %d, %v, want 0 and no error", n, err)
	}
}

// checkRegister offers what a backend cannot take, and what it must.
func checkRegister(s *stage) {
	mem := make([]byte, 4096)
	served := s.caps.Pairs.Local()
	for kind, seg := range map[driver.Kind]driver.Segment{
		driver.DRAM: {Kind: driver.DRAM, Len: 4096, Mem: mem},
		driver.HBM:  {Kind: driver.HBM, Len: 4096, Addr: 1 << 40},
		driver.File: {Kind: driver.File, Len: 4096, FD: 0},
		200:         {Kind: 200, Len: 4096},
	} {
		if served.Has(kind) {
			continue
		}
		if _, err := s.near.b.Register(seg); !errors.Is(err, driver.ErrNotSupported) {
			s.Errorf("register memory of kind %v: %v, want %v", kind, err, driver.ErrNotSupported)
		}
	}
	if served.Has(driver.DRAM) {
		for _, seg := range []driver.Segment{
			{Mem: mem}, {Len: 4096}, {Len: 4097, Mem: mem}, {Len: 1 << 60, Mem: mem},
		} {
			if _, err := s.near.b.Register(seg); err == nil {
				s.Errorf("register %d bytes of %d: no error", seg.Len, len(seg.Mem))
			}
		}
	}
	m := s.home.share(4096)
	for range 3 {
		again := m.slice(0, m.size)
		if bytes.Equal(again.token, m.token) {
			s.Error("two registrations of the same range have the same token")
		}
	}
}

// checkReverse has the far side write, read and verify, so that each side has
// been the initiator.
func checkReverse(s *stage) {
	n := uint64(300000)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l, r := s.far.local(n), s.home.share(n)
	l.paint(s.seed())
	r.paint(s.seed())
	key := s.far.must(request{Do: "import", Peer: back, Data: r.token}).Key
	unit := uint64(100)
	for i, op := range []driver.Op{driver.Write, driver.Read, driver.Write} {
		lOff, rOff := unit*uint64(i), unit*uint64(2*i)
		d := driver.Desc{Local: lOff, Remote: rOff, Len: n - 5*unit, LocalKey: l.key,
			RemoteKey: key}
		descs := s.pieces(d)
		descs = descs[:min(len(descs), s.caps.DescsMax)]
		tag := s.far.must(request{Do: "submit", Peer: back, Op: op, Descs: descs}).Tag
		s.far.must(request{Do: "await", Tag: tag})
		for _, d := range descs {
			if op == driver.Read {
				copy(l.want[d.Local:d.Local+d.Len], r.want[d.Remote:])
			} else {
				copy(r.want[d.Remote:d.Remote+d.Len], l.want[d.Local:])
			}
		}
		for wait := newPatience(s.h.Limit); !r.same() && wait.more(); {
			// no promise without a message
		}
		if !l.expect(op.String()) || !r.expect(op.String()) {
			return
		}
		l.paint(s.seed())
	}
}

// checkCloseTwice closes everything twice, and then tries to use it.
func checkCloseTwice(s *stage) {
	n := uint64(4096)
	l, r := s.local(n), s.remote(n)
	m := s.near.region(l.id).mem
	unused := s.home.local(n)
	for range 2 {
		if err := s.inTime("revoke memory", unused.revoke); err != nil {
			s.Errorf("revoke memory: %v, want nil each time", err)
		}
	}
	if one, two := s.home.local(n), s.home.local(n); one.key == two.key {
		s.Errorf("two memories have key %d, which was another's that was revoked twice", one.key)
	}
	for range 2 {
		if err := s.inTime("close backend", s.near.b.Close); err != nil {
			s.Errorf("close backend: %v, want nil each time", err)
		}
	}
	s.closedBackend(s.near.region(l.id).seg)
	s.refuseClosed("Backend.Close", r, desc(l, 0, r, 0, n))
	s.afterClose(m, r)
}

// checkChurn connects, registers and imports over and over: nothing may pile up.
func checkChurn(s *stage) {
	n := uint64(4096)
	l, whole := s.local(n), s.remote(4*n)
	before := descriptors(s.TB)
	for range 40 {
		part := whole.slice(n, n)
		p, err := s.near.connect(s.farAddr, s.h.Limit)
		s.ok(err, "connect")
		key, _, err := s.near.peer(p).Import(part.token)
		s.ok(err, "import")
		d := driver.Desc{LocalKey: l.key, RemoteKey: key, Len: n}
		tag, err := s.near.submit(p, driver.Write, []driver.Desc{d}, nil)
		s.ok(err, "submit")
		s.ok(s.await(tag), "write")
		s.ok(s.inTime("close peer", s.near.peer(p).Close), "close peer")
		s.ok(part.revoke(), "revoke memory")
	}
	copy(whole.want[n:], l.want)
	for wait := newPatience(s.h.Limit); ; {
		left := s.drainMessages() // a connection may stay until its last word is heard
		now := descriptors(s.TB)
		if len(left) == 0 && now <= before+8 {
			break
		}
		if len(left) == 0 && !wait.more() {
			s.Fatalf("40 connections, all closed, left %d descriptors open, before %d", now, before)
		}
	}
	s.compare(l, whole, "after churn")
}

func checkLost(s *stage) {
	lost := s.peer.Lost()
	if lost == nil && s.wiring != Processes {
		s.Log("this peer cannot be lost")
		return
	}
	select {
	case <-lost:
		s.Fatal("Lost is closed although the peer is there")
	case <-time.After(10 * time.Millisecond):
	}
	if err := s.inTime("close peer", s.peer.Close); err != nil {
		s.Errorf("close peer: %v", err)
	}
	select {
	case <-lost:
	case <-time.After(s.h.Limit):
		s.hang("Lost of a closed peer")
	}
}

func checkExplain(s *stage) {
	l, r := s.local(4096), s.remote(4096)
	if line := s.peer.Explain(l.key, r.as); line == "" || strings.Contains(line, "\n") {
		s.Errorf("Explain returned %q, want one line", line)
	}
	s.peer.Explain(1<<31, 1<<32-1) // unknown keys: must not panic
}
