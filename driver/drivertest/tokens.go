// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

var tokenChecks = []check{
	{name: "Token", wirings: here, run: checkToken},
	{name: "ForgedToken", wirings: everywhere, run: checkForgedToken},
	{name: "ForeignToken", wirings: everywhere, run: checkForeignToken},
	{name: "StaleToken", wirings: everywhere, run: checkStaleToken},
	{name: "ImportTwice", wirings: everywhere, run: checkImportTwice},
}

// checkToken looks at the form of tokens and keys.
func checkToken(s *stage) {
	keys := map[uint32]bool{}
	whole := s.home.share(8192)
	for i := range 20 {
		m := whole
		if i > 0 {
			m = whole.slice(uint64(i), 100)
		}
		if keys[m.key] {
			s.Errorf("key %d names two memories", m.key)
		}
		keys[m.key] = true
		r := s.near.region(m.id)
		if len(m.token) > driver.TokenMax {
			s.Errorf("token of %d bytes, at most %d", len(m.token), driver.TokenMax)
		}
		if !bytes.HasPrefix(m.token, r.seg.Secret[:]) {
			s.Errorf("token %x does not begin with the secret %x", m.token, r.seg.Secret)
		}
		appended, err := r.mem.AppendToken([]byte("prefix"))
		if err != nil || !bytes.HasPrefix(appended, []byte("prefix")) {
			s.Errorf("AppendToken returned %q, %v: it must append", appended, err)
		}
		if bytes.Contains(s.near.b.Addr(), r.seg.Secret[:]) {
			s.Error("Addr gives a secret away")
		}
	}
}

// checkForgedToken cuts a token at every length and turns over every bit.
func checkForgedToken(s *stage) {
	n := uint64(5000)
	l, r := s.local(n), s.remote(n)
	for i := range r.token {
		s.badToken(fmt.Sprintf("cut to %d of %d bytes", i, len(r.token)), r.token[:i:i])
	}
	for i := range 8 * len(r.token) {
		forged := slices.Clone(r.token)
		forged[i/8] ^= 1 << (i % 8)
		// A bit of the epoch may make it a past one.
		s.badToken(fmt.Sprintf("bit %d of byte %d turned over", i%8, i/8), forged,
			driver.ErrRevoked)
	}
	for _, more := range [][]byte{{0}, {0xff}, make([]byte, 1000), make([]byte, 1<<16)} {
		s.badToken(fmt.Sprintf("%d bytes more", len(more)), append(slices.Clone(r.token), more...))
		s.badToken(fmt.Sprintf("%d bytes of nonsense", len(more)), more)
	}
	s.badToken("none", nil)
	s.move(driver.Write, desc(l, 0, r, 0, n))
	s.compare(l, r, "after forged tokens")
}

// badToken imports what must be refused, with ErrBadToken or one of also.
func (s *stage) badToken(what string, token []byte, also ...error) {
	s.Helper()
	key, size, err := s.peer.Import(token)
	if err == nil {
		s.Errorf("token %s: Import accepted it as key %d of %d bytes", what, key, size)
		s.peer.Drop(key)
		return
	}
	for _, want := range append(also, driver.ErrBadToken) {
		if errors.Is(err, want) {
			return
		}
	}
	s.Errorf("token %s: %v, want %v", what, err, driver.ErrBadToken)
}

// checkForeignToken shows the far side tokens of another backend, whose keys
// are the same.
func checkForeignToken(s *stage) {
	stranger := s.side("stranger", s.openHere("stranger"))
	for range 3 {
		own, foreign := s.far.share(4096), stranger.share(4096)
		s.imports(own)
		s.badToken("of another backend", foreign.token)
	}
}

// checkStaleToken shows tokens of memory that is gone, or whose epoch has ended.
func checkStaleToken(s *stage) {
	n := uint64(5000)
	l, whole := s.local(n), s.remote(4*n)
	part := whole.slice(n, n)
	s.imports(part)
	s.ok(part.revoke(), "revoke memory")
	s.badToken("of closed memory", part.token, driver.ErrRevoked)
	s.fails("write to closed memory", nil, s.submitting(driver.Write, desc(l, 0, part, 0, n)))
	again := whole.slice(n, n)
	s.badToken("of closed memory whose key may be another's now", part.token, driver.ErrRevoked)
	s.fails("write to closed memory whose key may be another's now", nil, s.submitting(driver.Write,
		desc(l, 0, part, 0, n)))
	s.compare(l, whole, "after writes to closed memory")
	s.imports(again)
	s.move(driver.Write, desc(l, 0, again, 0, n))
	copy(whole.want[n:], again.want)
	s.compare(l, whole, "after a write to the same range, registered anew")
}

// checkImportTwice has a token imported twice: each import has a key of its own,
// which is forgotten on its own.
func checkImportTwice(s *stage) {
	n := uint64(5000)
	l, r := s.local(n), s.remote(n)
	for round := range 4 {
		first := r.as
		s.imports(r)
		second := r.as
		if first == second {
			s.Fatalf("two imports of a token have the same key %d", first)
		}
		kept, dropped := first, second
		if round%2 == 0 {
			kept, dropped = second, first
		}
		s.peer.Drop(dropped)
		s.peer.Drop(dropped) // of what is not there: ignored, the other import above all
		for _, op := range bothOps {
			gone := driver.Desc{Len: n, LocalKey: l.key, RemoteKey: dropped}
			s.refused("the import that was dropped", driver.ErrBounds, s.submitting(op, gone))
		}
		r.as = kept
		s.move(driver.Write, desc(l, 0, r, 0, n))
		s.compare(l, r, "with the import that was kept")
		l.paint(s.seed())
	}
}
