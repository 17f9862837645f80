// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

const (
	soakPlaces = 16
	soakBytes  = 64 << 10 // of a place, near and far
)

// soak has a batch under way for each of several places, and knows what must be where.
type soak struct {
	l        *testLink
	r        *rand.Rand
	free     []int
	places   map[uint64]int // by the tag of what is under way there
	writes   map[uint64]bool
	far      [soakPlaces][]byte // as it was when the last batch of the place ended
	number   uint64             // of the last message
	last     uint64             // message that came
	came     map[uint64]bool
	owed     map[uint64]uint64 // messages by their batch
	cancels  map[uint64]bool
	aborted  int
	finished int
}

func (s *soak) at(place int) ([]byte, []byte) {
	from := place * soakBytes
	return s.l.local[from : from+soakBytes], s.l.remote[from : from+soakBytes]
}

func (s *soak) submit(t *testing.T) {
	place := s.free[len(s.free)-1]
	local, far := s.at(place)
	if s.far[place] != nil && !bytes.Equal(far, s.far[place]) {
		promise.Broken(t, "place %d has changed after its batch had ended", place)
	}
	op := driver.Op(driver.Write)
	if s.r.IntN(4) == 0 {
		op = driver.Read
		fill(far, s.r.Uint64())
		clear(local)
	} else {
		fill(local, s.r.Uint64())
	}
	var msg []byte
	if op == driver.Write && s.r.IntN(2) == 0 {
		msg = numbered(int(s.number + 1))
	}
	s.l.tag++
	from := uint64(place * soakBytes)
	descs := s.l.descs(
		driver.Desc{Local: from, Remote: from, Len: 1000},
		driver.Desc{Local: from + 1000, Remote: from + 1000, Len: 30_000},
		driver.Desc{Local: from + 31_000, Remote: from + 31_000, Len: soakBytes - 31_000})
	err := s.l.conn.Submit(s.l.tag, batchOf(op, descs, msg))
	if errors.Is(err, driver.ErrFull) && msg != nil {
		return
	}
	require.NoError(t, err)
	if msg != nil {
		s.number++
		s.owed[s.l.tag] = s.number
	}
	s.free = s.free[:len(s.free)-1]
	s.places[s.l.tag] = place
	s.writes[s.l.tag] = op == driver.Write
	if s.r.IntN(8) == 0 {
		tag, after := s.l.tag, time.Duration(s.r.IntN(3000))*time.Microsecond
		time.Sleep(after / 8)
		s.l.conn.Cancel(tag)
		s.cancels[tag] = true
	}
}

func (s *soak) finish(t *testing.T, d Done) {
	place, ok := s.places[d.Tag]
	if !ok {
		t.Fatalf("tag %d completed, which is not under way", d.Tag)
	}
	delete(s.places, d.Tag)
	local, far := s.at(place)
	switch err := Error(d); {
	case errors.Is(err, driver.ErrAborted):
		s.aborted++
		delete(s.owed, d.Tag) // it may come or not
	case err != nil:
		t.Fatal(err)
	case !bytes.Equal(local, far):
		promise.Broken(t, "batch %d, a write: %v: other bytes", d.Tag, s.writes[d.Tag])
	}
	s.far[place] = bytes.Clone(far)
	s.free = append(s.free, place)
	s.finished++
}

func (s *soak) receive(t *testing.T) {
	for {
		n, ok := s.l.far.Receive()
		if !ok {
			return
		}
		v := binary.LittleEndian.Uint64(n.Data)
		if v <= s.last {
			promise.Broken(t, "message %d after %d", v, s.last)
		}
		s.last = v
		s.came[v] = true
	}
}

func (s *soak) poll(t *testing.T) {
	var done [8]Done
	for _, d := range done[:s.l.near.Poll(done[:])] {
		s.finish(t, d)
	}
	s.receive(t)
}

// Many batches at once, some of them cancelled, while devices fail by chance.
func TestManyBatchesWithFaults(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			d := fakeDevices(t, 2)
			l := openLink(t, d, testShape{pairs: 2, timeout: 6, retries: 1,
				bytes: soakPlaces * soakBytes})
			m := l.mend(t, 0)
			chance := fakeverbs.NewChance(d.fake, seed, []int{0, 2}, []int{1, 3})
			s := &soak{l: l, r: rand.New(rand.NewPCG(seed, 3)), places: map[uint64]int{},
				writes:  map[uint64]bool{},
				cancels: map[uint64]bool{}, came: map[uint64]bool{}, owed: map[uint64]uint64{}}
			for i := range soakPlaces {
				s.free = append(s.free, i)
			}
			end := time.Now().Add(patience)
			for s.finished < 400 || len(s.places) > 0 {
				if s.finished < 400 && len(s.free) > 0 {
					if s.r.IntN(4) == 0 {
						chance.Harm()
					}
					s.submit(t)
				}
				s.poll(t)
				if time.Now().After(end) {
					t.Fatalf("%d of %d batches are still under way", len(s.places), s.finished)
				}
			}
			chance.Rest()
			for tag, n := range s.owed {
				for !s.came[n] && time.Now().Before(end) {
					s.receive(t)
				}
				if !s.came[n] {
					t.Errorf("message %d of batch %d (cancelled: %v) never came", n, tag,
						s.cancels[tag])
				}
			}
			m.stop()
			neverOverrun(t, d.fake, 4)
			t.Logf("%d failures of queue pairs, %d batches aborted of %d, %d messages", m.fails,
				s.aborted, s.finished, len(s.came))
		})
	}
}

// All at once, by chance, and nothing is lost, done twice or out of order.
func TestFaultsByChance(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			d := fakeDevices(t, 2)
			l := openLink(t, d, testShape{pairs: 2, timeout: 6, retries: 1, bytes: 1 << 20})
			m := l.mend(t, 0)
			chance := fakeverbs.NewChance(d.fake, seed, []int{0, 2}, []int{1, 3})
			r := rand.New(rand.NewPCG(seed, 1))
			shadow := bytes.Clone(l.remote)
			for i := range 150 {
				chance.Harm()
				n := uint64(r.IntN(200_000))
				at, from := uint64(r.IntN(1<<20-200_000)), uint64(r.IntN(1<<20-200_000))
				if i%3 == 2 {
					if err := l.move(t, driver.Read, driver.Desc{Local: from, Remote: at,
						Len: n}); err != nil {
						t.Fatalf("read %d: %v", i, err)
					}
					if !bytes.Equal(l.local[from:from+n], shadow[at:at+n]) {
						t.Fatalf("read %d: other bytes", i)
					}
					continue
				}
				fill(l.local[from:from+n], r.Uint64())
				copy(shadow[at:at+n], l.local[from:from+n])
				tag := l.submit(t, driver.Write, numbered(i), driver.Desc{Local: from, Remote: at,
					Len: n})
				if err := l.outcome(t, tag); err != nil {
					t.Fatalf("write %d: %v", i, err)
				}
				if got := l.notif(t); binary.LittleEndian.Uint64(got.Data) != uint64(i) {
					t.Fatalf("message %d after write %d", binary.LittleEndian.Uint64(got.Data), i)
				}
				if !bytes.Equal(l.remote, shadow) {
					t.Fatalf("write %d: other bytes", i)
				}
			}
			chance.Rest()
			m.stop()
			neverOverrun(t, d.fake, 4)
			t.Logf("%d failures of queue pairs", m.fails)
		})
	}
}

// neverOverrun checks what is so by construction.
func neverOverrun(t *testing.T, f *fakeverbs.Fabric, devices int) {
	t.Helper()
	for i := range devices {
		if n := f.Device(i).Get(fakeverbs.Overruns); n != 0 {
			t.Errorf("%d completions had no place on device %d", n, i)
		}
		if n := f.Device(i).Get(fakeverbs.Unready); n != 0 {
			t.Errorf("%d messages found no receive on device %d", n, i)
		}
	}
}
