// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// stressAt makes the test binary the other process of the stress of fences.
var stressAt = flag.String("stress-at", "", "backend:socket; for the tests' own use")

// Each of stressSlots parts of a region has one use at a time.
const (
	stressSlots = 8
	stressPart  = 256 << 10
)

// stressSide is an engine with a region, in either process.
type stressSide struct {
	e      *engine.Engine
	memory *engine.Memory
	region *engine.Region
}

func stressBackend(name string) (driver.Backend, error) {
	switch name {
	case "tcp":
		return tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true,
			Grace: 20 * time.Millisecond})
	case "ucx":
		return ucx.New(ucx.Config{})
	}
	return shm.New(shm.Config{Grace: 5 * time.Millisecond})
}

func newStressSide(backend, name string, onPeer func(*engine.Peer)) (*stressSide, error) {
	b, err := stressBackend(backend)
	if err != nil {
		return nil, err
	}
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}, OnPeer: onPeer,
		AbortGrace: 2 * time.Second})
	if err != nil {
		return nil, err
	}
	s := &stressSide{e: e}
	if s.memory, err = e.Alloc(stressSlots*stressPart,
		engine.AllocOptions{Purpose: "test"}); err == nil {
		s.region, err = e.Register("region", s.memory.Segment())
	}
	return s, err
}

func (s *stressSide) part(slot int) []byte {
	return s.region.Bytes()[slot*stressPart:][:stressPart]
}

func paint(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

func strays(b []byte, want byte) (n int) {
	for _, v := range b {
		if v != want {
			n++
		}
	}
	return n
}

// churn registers, describes and closes beside what is tested, until stop is closed.
func (s *stressSide) churn(stop <-chan struct{}) error {
	for i := 0; ; i++ {
		select {
		case <-stop:
			return nil
		default:
		}
		m, err := s.e.Alloc(64<<10, engine.AllocOptions{Purpose: "test"})
		if err != nil {
			return err
		}
		r, err := s.e.Register(fmt.Sprint("beside ", i%3), m.Segment())
		if err == nil {
			_, err = s.e.Describe()
			if end := r.Close(); err == nil {
				err = end
			}
		}
		if end := m.Close(); err == nil {
			err = end
		}
		if err != nil {
			return fmt.Errorf("register, describe and close beside: %w", err)
		}
		time.Sleep(time.Millisecond)
	}
}

// stressMover is the other process: it writes where it is given leases, and looks after parts
// of its own region. It ends with its input.
type stressMover struct {
	*stressSide
	peer atomic.Pointer[engine.Peer]
	out  sync.Mutex
}

func stressProcess(at string) error {
	backend, socket, _ := strings.Cut(at, ":")
	m := &stressMover{}
	var err error
	if m.stressSide, err = newStressSide(backend, "mover", func(p *engine.Peer) {
		m.peer.Store(p)
	}); err != nil {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	go func() { _ = m.e.Serve(context.Background(), l) }()
	go func() {
		if err := m.churn(nil); err != nil {
			m.say("broken %v", err)
		}
	}()
	m.say("listens")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var what, token string
		var slot, value int
		_, _ = fmt.Sscan(in.Text(), &what, &slot, &value, &token)
		switch what {
		case "move":
			go m.move(slot, token)
		case "paint":
			paint(m.part(slot), byte(value))
			m.say("painted %d", slot)
		case "look":
			m.say("found %d %d", slot, strays(m.part(slot), byte(value)))
		}
	}
	os.Exit(0)
	return nil
}

func (m *stressMover) say(format string, args ...any) {
	m.out.Lock()
	defer m.out.Unlock()
	fmt.Printf(format+"\n", args...)
}

// move writes over a lease until that has ended, or the connection has.
func (m *stressMover) move(slot int, token string) {
	defer m.say("over %d", slot)
	p := m.peer.Load()
	lease, err := hex.DecodeString(token)
	if err != nil || p == nil {
		return
	}
	r, err := p.Import(lease)
	if err != nil {
		return
	}
	defer r.Close()
	const transfers = 4
	var all sync.WaitGroup
	for i := range transfers {
		all.Go(func() {
			m.moveOne(p, r, slot, uint64(i)*stressPart/transfers, stressPart/transfers)
		})
	}
	all.Wait()
}

// moveOne posts one transfer again and again. It has pieces of several sizes, more than a
// backend has room for, so some wait in the backlog.
func (m *stressMover) moveOne(p *engine.Peer, r *engine.Remote, slot int, at, n uint64) {
	t, err := m.e.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		return
	}
	defer t.Close()
	paint(m.part(slot)[at:][:n], byte(0x80+slot))
	for off := uint64(0); off < n; {
		size := min(n-off, 64+off/2)
		if t.Add(m.region, uint64(slot)*stressPart+at+off, r, at+off, size) != nil {
			return
		}
		off += size + 8
		if off >= n {
			break
		}
	}
	for t.Post() == nil {
		if t.Wait(context.Background()) != nil {
			return
		}
	}
}
