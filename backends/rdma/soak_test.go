// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const (
	soakPlaces  = 8
	soakBytes   = 96 << 10
	soakBatches = 250
)

// soakPlace is memory at both ends, with at most one batch under way.
type soakPlace struct {
	local, remote *memory
	key           uint32
	tag           uint64 // 0: nothing is under way
	read          bool
	message       uint64    // of the batch, 0: none
	still         []byte    // what remote is while nothing may land, nil: not known
	revoked       bool      // the key is over
	disturb       time.Time // when the batch is cancelled, or the memory revoked; zero: not at all
}

// soak keeps many batches under way, cancels some, revokes the memory of some, and knows what must
// be true all the while.
type soak struct {
	*pair
	r                            *rand.Rand
	places                       []*soakPlace
	sent, last                   uint64
	came                         map[uint64]bool
	owed                         map[uint64]bool
	finished, cancelled, revoked int
}

func openSoak(t *testing.T, seed uint64) *soak {
	t.Helper()
	cfg := brisk()
	cfg.Slice = 32 << 10
	s := &soak{pair: openPair(t, cfg), r: rand.New(rand.NewPCG(seed, 4)),
		came: map[uint64]bool{}, owed: map[uint64]bool{}}
	for range soakPlaces {
		p := &soakPlace{local: register(t, s.near, soakBytes), remote: register(t, s.far,
			soakBytes)}
		p.key = s.imports(t, p.remote)
		s.places = append(s.places, p)
	}
	return s
}

func (s *soak) scramble(b []byte) {
	word := s.r.Uint64()
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word+uint64(i))
	}
}

func (s *soak) submit(t *testing.T, p *soakPlace) {
	if p.still != nil && !bytes.Equal(p.remote.bytes, p.still) {
		testkit.FatalBroken(t, "memory has changed after its batch had ended")
	}
	if p.revoked {
		s.peer.Drop(p.key)
		m, err := s.far.Register(driver.Segment{Kind: driver.DRAM, Mem: p.remote.bytes,
			Len: soakBytes})
		require.NoError(t, err)
		p.remote = m.(*memory)
		p.key = s.imports(t, p.remote)
		p.revoked = false
	}
	op, msg := driver.Op(driver.Write), []byte(nil)
	p.read, p.message = s.r.IntN(4) == 0, 0
	if p.read {
		op = driver.Read
		s.scramble(p.remote.bytes)
	} else {
		s.scramble(p.local.bytes)
		if s.r.IntN(2) == 0 {
			msg = binary.LittleEndian.AppendUint64(nil, s.sent+1)
		}
	}
	var descs []driver.Desc
	for at, n := uint64(0), uint64(0); at < soakBytes; at += n {
		n = min(uint64(1+s.r.IntN(40_000)), soakBytes-at)
		descs = append(descs, driver.Desc{Local: at, Remote: at, Len: n, LocalKey: p.local.key,
			RemoteKey: p.key})
	}
	s.tag++
	b := &driver.Batch{Op: op, Descs: descs, Notify: msg}
	if msg != nil {
		b.Tail = driver.NotifyTail
	}
	switch err := s.peer.Submit(s.tag, b); {
	case errors.Is(err, driver.ErrFull):
		return
	case err != nil:
		t.Fatalf("submit: %v", err)
	}
	p.tag, p.still, p.disturb = s.tag, nil, time.Time{}
	if s.r.IntN(5) == 0 {
		p.disturb = time.Now().Add(time.Duration(s.r.IntN(2000)) * time.Microsecond)
	}
	if msg != nil {
		s.sent++
		p.message = s.sent
	}
}

// disturb cancels or revokes what is under way.
func (s *soak) disturb(t *testing.T, p *soakPlace) {
	p.disturb = time.Time{}
	if s.r.IntN(2) == 0 {
		s.peer.Cancel(p.tag)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, p.remote.Revoke(ctx), "revoke")
	p.revoked = true
	p.still = bytes.Clone(p.remote.bytes)
}

func (s *soak) finish(t *testing.T, c driver.Completion) {
	for _, p := range s.places {
		if p.tag != c.Tag {
			continue
		}
		switch {
		case errors.Is(c.Err, driver.ErrAborted):
			s.cancelled++
		case errors.Is(c.Err, driver.ErrRevoked) && p.revoked:
			s.revoked++
		case c.Err != nil:
			t.Fatalf("batch %d: %v", c.Tag, c.Err)
		case !bytes.Equal(p.local.bytes, p.remote.bytes):
			t.Fatalf("batch %d, a read: %v: other bytes", c.Tag, p.read)
		case p.message != 0:
			s.owed[p.message] = true
		}
		if p.still == nil {
			p.still = bytes.Clone(p.remote.bytes)
		}
		p.tag = 0
		s.finished++
		return
	}
	t.Fatalf("tag %d completed, and is not under way", c.Tag)
}

func (s *soak) poll(t *testing.T) {
	var done [8]driver.Completion
	n, err := s.near.Poll(done[:])
	require.NoError(t, err)
	for _, c := range done[:n] {
		s.finish(t, c)
	}
	for _, m := range received(t, s.far) {
		if m.Err != nil {
			t.Fatalf("the last word: %v", m.Err)
		}
		v := binary.LittleEndian.Uint64(m.Data)
		if v <= s.last {
			t.Fatalf("message %d after %d", v, s.last)
		}
		s.last, s.came[v] = v, true
	}
}

func (s *soak) busy() int {
	n := 0
	for _, p := range s.places {
		if p.tag != 0 {
			n++
		}
	}
	return n
}

// run goes on until all is over.
func (s *soak) run(t *testing.T, chance *standin.VerbsChance) {
	end := time.Now().Add(patience)
	for s.finished < soakBatches || s.busy() > 0 {
		p := s.places[s.r.IntN(len(s.places))]
		switch {
		case s.finished >= soakBatches:
		case p.tag == 0:
			s.submit(t, p)
			if s.r.IntN(3) == 0 {
				chance.Harm()
			}
		case !p.disturb.IsZero() && time.Now().After(p.disturb):
			s.disturb(t, p)
		}
		s.poll(t)
		if time.Now().After(end) {
			t.Fatalf("%d batches are still under way, %d are over; %s", s.busy(), s.finished,
				s.peer.Explain(0, 0))
		}
	}
	chance.Rest()
	for n := range s.owed {
		for !s.came[n] && time.Now().Before(end) {
			s.poll(t)
		}
		if !s.came[n] {
			t.Errorf("message %d never came", n)
		}
	}
	for _, p := range s.places {
		if !bytes.Equal(p.remote.bytes, p.still) {
			testkit.ErrorBroken(t, "memory has changed after its batch had ended")
		}
	}
}

// TestFaultsByChance runs all of the host code, the C side and the control plane, over devices that
// fail by chance, while batches are cancelled and memory is revoked: no byte is wrong or late, no
// message lost, twice or out of order, and the peer is not given up.
func TestFaultsByChance(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			s := openSoak(t, seed)
			f := s.fabric
			s.run(t, standin.NewVerbsChance(f, seed, []int{0, 2}, []int{1, 3}))
			var again, failures uint64
			for i := range s.near.rails {
				counted, err := s.near.net.Counters(i)
				require.NoError(t, err)
				again, failures = again+counted.Reposted, failures+counted.Failures
			}
			for i := range 4 { // these are so by construction
				require.Zero(t, f.Device(i).Get("overruns"), "completions without a place")
				require.Zero(t, f.Device(i).Get("unready"), "messages without a receive")
			}
			t.Logf("%d batches, %d cancelled, %d revoked, %d messages; "+
				"%d failures of queue pairs, %d requests done again",
				s.finished, s.cancelled, s.revoked, len(s.came), failures, again)
		})
	}
}
