// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// What the tests of failure move: each side has a region that the other one
// reaches, kv, and one of its own, src. Writes go from the front of src to the front
// of kv, reads from the back of kv to the back of src.
const (
	sideBytes = 4 << 20
	pieces    = 4
	pieceSize = sideBytes / pieces
	writes    = pieces / 2 // pieces before this one are written, the others read
)

// The bytes that a range holds once nothing may land in it any more. They differ: a
// read that lands late would otherwise bring what is there.
const (
	poisonKV  = 0xe1
	poisonSrc = 0xe2
)

// limit bounds what must happen but not when.
const limit = 15 * time.Second

// sideConfig says how a side is made.
type sideConfig struct {
	Name       string
	UCX        ucx.Config
	AbortGrace time.Duration
}

// side is an engine over ucx with its memory. The test has one, its child another.
type side struct {
	e       *engine.Engine
	memory  []*engine.Memory
	kv, src *engine.Region
	lease   *engine.Lease
	peer    *engine.Peer
	remote  *engine.Remote
	flood   *flood
}

func newSide(c sideConfig) (*side, error) {
	b, err := ucx.New(c.UCX)
	if err != nil {
		return nil, err
	}
	s := &side{}
	s.e, err = engine.Open(engine.Config{Name: c.Name, Backends: []driver.Backend{b},
		AbortGrace: c.AbortGrace})
	if err != nil {
		return nil, err
	}
	for _, r := range []struct {
		name string
		to   **engine.Region
	}{{"kv", &s.kv}, {"src", &s.src}} {
		if err = s.register(r.name, r.to); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

func (s *side) register(name string, to **engine.Region) error {
	m, err := engine.Alloc(sideBytes, engine.AllocOptions{Populate: true})
	if err != nil {
		return err
	}
	s.memory = append(s.memory, m)
	*to, err = s.e.Register(name, m.Segment())
	return err
}

func (s *side) close() error {
	err := s.e.Close()
	for _, m := range s.memory {
		err = errors.Join(err, m.Close())
	}
	return err
}

// grant leases the range that is written to, and returns the token.
func (s *side) grant() ([]byte, error) {
	l, err := s.kv.Lease(0, writes*pieceSize, engine.LeaseOptions{})
	if err != nil {
		return nil, err
	}
	s.lease = l
	return l.Token(), nil
}

// connect reaches the other side's kv. A peer from before is closed first.
func (s *side) connect(description []byte) error {
	if s.peer != nil {
		_ = s.peer.Close()
	}
	var err error
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if s.peer, err = s.e.Connect(ctx, description); err != nil {
		return err
	}
	s.remote, err = s.peer.Remote("kv")
	return err
}

// flood keeps every piece moving until that fails.
type flood struct {
	list  []*engine.Transfer
	tasks sync.WaitGroup

	mu   sync.Mutex
	errs []error
	at   time.Duration // of the last one that ended
}

// uptime is a clock that all processes of the machine share.
func uptime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return time.Duration(t.Nano())
}

// start begins to move everything, with a lease's token in place of the region to
// write to if there is one.
func (s *side) start(lease []byte) error {
	s.flood = &flood{}
	target := s.remote
	if lease != nil {
		var err error
		if target, err = s.peer.Import(lease); err != nil {
			return err
		}
	}
	for i := range uint64(pieces) {
		op, to := engine.Write, target
		if i >= writes {
			op, to = engine.Read, s.remote
		}
		t, err := s.e.NewTransfer(s.peer, op, engine.Route{})
		if err == nil {
			err = t.Add(s.src, i*pieceSize, to, i*pieceSize, pieceSize)
		}
		if err == nil {
			err = errors.Join(t.Post(), t.Wait(context.Background())) // it works, to begin with
		}
		if err != nil {
			return err
		}
		s.flood.list = append(s.flood.list, t)
	}
	for _, t := range s.flood.list {
		s.flood.tasks.Go(func() { s.flood.repeat(t) })
	}
	return nil
}

func (f *flood) repeat(t *engine.Transfer) {
	err := t.Post()
	for ; err == nil; err = t.Post() {
		if err = t.Wait(context.Background()); err != nil {
			break
		}
	}
	f.mu.Lock()
	f.errs = append(f.errs, err)
	f.at = uptime()
	f.mu.Unlock()
}

// outcome waits for the end of everything, and says what it was and when.
func (f *flood) outcome() (at time.Duration, err error) {
	ended := make(chan struct{})
	go func() { f.tasks.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(limit):
		return 0, fmt.Errorf("transfers do not end within %v", limit)
	}
	for _, t := range f.list {
		err = errors.Join(err, t.Close())
	}
	for _, e := range f.errs {
		if !errors.Is(e, engine.ErrPeerLost) && !errors.Is(e, engine.ErrRevoked) &&
			!errors.Is(e, engine.ErrAborted) && !errors.Is(e, engine.ErrClosed) {
			err = errors.Join(err, fmt.Errorf("a transfer ended with %v", e))
		}
	}
	return f.at, err
}

// lastWord waits until the engine has told of the other side's end.
func (s *side) lastWord() (at time.Duration, err error) {
	select {
	case n := <-s.e.Notifications():
		if !errors.Is(n.Err, engine.ErrPeerLost) {
			err = fmt.Errorf("notified %q, %v: want %v", n.Data, n.Err, engine.ErrPeerLost)
		}
		return uptime(), err
	case <-time.After(limit):
		return 0, fmt.Errorf("no last word within %v", limit)
	}
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

// parts of what nothing may land in.
const (
	inKV = 1 << iota
	inSrc
	inAll = inKV | inSrc
)

// poison fills what nothing may land in any more.
func (s *side) poison(what int) {
	if what&inKV != 0 {
		fill(s.kv.Bytes(), poisonKV)
	}
	if what&inSrc != 0 {
		fill(s.src.Bytes(), poisonSrc)
	}
}

// landed is how many bytes lie between the first and the last that are not poison.
func landed(b []byte, poison byte) int {
	from, to := 0, len(b)
	for from < to && b[from] == poison {
		from++
	}
	for from < to && b[to-1] == poison {
		to--
	}
	return to - from
}

// landedText is in what watch returns where something landed, as the child tells it, too.
const landedText = "bytes landed"

// watch looks for a time whether the poison is untouched, but for so many bytes side
// by side in what others write to.
func (s *side) watch(what int, d time.Duration, but int) error {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		if landed := landed(s.kv.Bytes(), poisonKV); what&inKV != 0 && landed > but {
			return fmt.Errorf("%d %s in what others write to", landed, landedText)
		}
		if landed := landed(s.src.Bytes(), poisonSrc); what&inSrc != 0 && landed > 0 {
			return fmt.Errorf("%d %s in what is read to", landed, landedText)
		}
		if time.Now().After(end) {
			return nil
		}
	}
}
