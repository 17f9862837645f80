// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupPrefillAt makes the test binary the first of two prefill ranks, for a decode rank that
// serves this socket.
var groupPrefillAt = flag.String("group-prefill-at", "",
	"socket of the decode rank; for the tests' own use")

func TestMain(m *testing.M) {
	flag.Parse()
	if *groupPrefillAt == "" {
		os.Exit(m.Run())
	}
	if err := groupPrefillProcess(*groupPrefillAt); err != nil {
		fmt.Fprintln(os.Stderr, "prefill process:", err)
		os.Exit(1)
	}
}

// processSpan is what every request of the prefill process has, in its first blocks.
var processSpan = layout.Span{From: 0, To: 60}

// processPlan is two prefill ranks and one decode rank, with layers of 240 KiB of each.
func processPlan() (*layout.Plan, error) {
	spec := grouped(3, 4, 1024)
	var sides []*layout.Side
	for _, p := range []layout.Placement{{TP: 2, BlockTokens: 4, Blocks: 32},
		{TP: 2, Rank: 1, BlockTokens: 4, Blocks: 32}, {BlockTokens: 6, Blocks: 32}} {
		s, err := layout.NewSide(spec, p)
		if err != nil {
			return nil, err
		}
		sides = append(sides, s)
	}
	return layout.NewPlan(sides[:2], sides[2:])
}

// groupPrefillProcess hands requests 1, 2 and so on over, but of those of even numbers a layer
// only. It ends when the other side is gone.
func groupPrefillProcess(socket string) error {
	plan, err := processPlan()
	if err != nil {
		return err
	}
	b, err := shm.New(shm.Config{})
	if err != nil {
		return err
	}
	stands := newStands(b)
	eng, err := engine.Open(engine.Config{Name: "prefill-0", Backends: []driver.Backend{stands}})
	if err != nil {
		return err
	}
	defer eng.Close()
	memory, err := eng.Alloc(plan.Senders()[0].Regions[0].Bytes,
		engine.AllocOptions{Purpose: "kv"})
	if err != nil {
		return err
	}
	region, err := eng.Register("kv", memory.Segment())
	if err != nil {
		return err
	}
	mux, start := NewMux(eng), make(chan struct{}, 1)
	// There is a receiver, or none any more.
	mux.HandleRest(func(engine.Notification) { signal(start) })
	peer, err := eng.Dial(context.Background(), "unix", socket)
	if err != nil {
		return err
	}
	s, err := NewGroupSender(mux, GroupConfig{Plan: plan,
		Regions: []*engine.Region{region}, Peers: []*engine.Peer{peer}})
	if err != nil {
		return err
	}
	<-start
	table := make([]uint32, 15)
	for i := range table {
		table[i] = uint32(i)
	}
	m := &member{side: plan.Senders()[0], regions: []*engine.Region{region}}
	for number := uint64(1); !isLost(peer); number++ {
		stands.request.Store(number)
		m.each(layout.Tables{table}, processSpan, func(v *layout.View, unit int, token uint64,
			cell []byte) {
			copy(cell, cellOf(number, v, unit, token))
		})
		p, err := s.Begin(context.Background(), number, layout.Tables{table}, processSpan)
		for l := 0; err == nil && l < 3; l++ {
			if l == 1 && number%2 == 0 {
				<-p.Ended()
			}
			err = p.Layer(context.Background(), l)
		}
		if err == nil {
			_ = p.Finish(context.Background())
		}
	}
	return nil
}

// withProcess is a crowd whose first prefill rank is another process. If it is to stand, it does
// so with its first bytes.
func withProcess(t *testing.T, patience time.Duration, stands bool) (*crowd, *child) {
	t.Helper()
	testkit.CheckLeaks(t)
	plan, err := processPlan()
	require.NoError(t, err)
	met := make(chan *engine.Peer, 1)
	s := crowdSetup{backend: newShm, engine: func(c *engine.Config) {
		c.OnPeer = func(p *engine.Peer) { met <- p }
	}}
	c := &crowd{plan: plan}
	prefill := newMember(t, "prefill-1", plan.Senders()[1], s)
	decode := newMember(t, "decode", plan.Receivers()[0], s)
	socket := filepath.Join(t.TempDir(), "decode.sock")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- decode.eng.Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		<-served
	})
	process := startChild(t, "-group-prefill-at", socket)
	if stands {
		process.stand(t)
	}
	prefill.peers = []*engine.Peer{connect(t, prefill.eng, decode.eng)}
	decode.peers = []*engine.Peer{nil, connect(t, decode.eng, prefill.eng)}
	select {
	case decode.peers[0] = <-met:
	case <-within(t).Done():
		require.Fail(t, "the prefill process does not come")
	}
	prefill.sender, err = NewGroupSender(prefill.mux, c.config(prefill, 1, true, s))
	require.NoError(t, err)
	s.config = func(_ bool, g *GroupConfig) {
		g.IdleTimeout, g.MeetTimeout = patience, patience
	}
	decode.receive, err = NewGroupReceiver(decode.mux, c.config(decode, 0, false, s))
	require.NoError(t, err)
	require.NoError(t, decode.peers[0].Notify(within(t), []byte("start")))
	c.from, c.to = []*member{prefill}, []*member{decode}
	t.Cleanup(func() {
		require.NoError(t, prefill.sender.Close())
		require.NoError(t, decode.receive.Close())
		require.Zero(t, prefill.eng.Stats().Leases+decode.eng.Stats().Leases)
	})
	return c, process
}

// pushUntilError hands all layers over from the rank of this process, and finishes.
func (j *job) pushUntilError(t *testing.T) {
	t.Helper()
	for l := range 3 {
		if j.pushes[0].Layer(within(t), l) != nil {
			return
		}
	}
	_ = j.pushes[0].Finish(within(t))
}

// TestTimedGroupKilledRank: a prefill process is killed in the middle of a request. The decode rank
// and the other prefill rank learn it, and nothing is left.
func TestTimedGroupKilledRank(t *testing.T) {
	c, process := withProcess(t, time.Minute, false)
	c.handOver(t, processSpan).give()
	j := c.newJob(t, processSpan)
	j.begin(t)
	require.NoError(t, j.pushes[0].Layer(within(t), 0))
	require.Equal(t, 0, <-j.requests[0].Ready())
	require.NoError(t, process.Kill())
	j.pushUntilError(t)
	j.awaitEnd(t)
	require.Zero(t, c.to[0].eng.Stats().Leases)
	for i, err := range j.errs() {
		require.ErrorIs(t, err, engine.ErrPeerLost, "rank %d", i)
	}
}

// TestTimedGroupStoppedRank: a prefill process is stopped before it writes, or at any moment of a
// request, and goes on when the blocks are used again. Nothing lands in them.
func TestTimedGroupStoppedRank(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 8))
	for round := range 6 {
		stands, patience := round%2 == 0, 200*time.Millisecond
		if stands {
			patience = time.Second // the process comes to that by then
		}
		c, process := withProcess(t, patience, stands)
		j := c.newJob(t, processSpan)
		var err error
		j.requests[0], err = c.to[0].receive.Open(within(t), j.number, j.to[0], j.span)
		require.NoError(t, err)
		if stands {
			require.Equal(t, j.number, <-process.stood())
		} else {
			time.Sleep(time.Duration(r.IntN(1500)) * time.Microsecond)
		}
		require.NoError(t, testkit.Freeze(process.Process))
		j.pushes[0], err = c.from[0].sender.Begin(within(t), j.number, j.from[0], j.span)
		if err == nil {
			j.pushUntilError(t)
		} else {
			requireStopped(t, err)
			j.pushes = nil
		}
		j.awaitEnd(t)
		require.Zero(t, c.to[0].eng.Stats().Leases)
		if err := j.requests[0].Err(); stands || err != nil {
			requireStopped(t, err)
		}
		var whole [][]byte
		c.to[0].each(j.to[0], j.span, func(_ *layout.View, _ int, _ uint64, cell []byte) {
			whole = append(whole, slices.Clone(cell))
		})
		require.NoError(t, testkit.Thaw(process.Process))
		if stands {
			process.letGo(t)
		}
		time.Sleep(20 * time.Millisecond)
		c.to[0].each(j.to[0], j.span, func(_ *layout.View, _ int, _ uint64, cell []byte) {
			if !bytes.Equal(whole[0], cell) {
				testkit.FatalBroken(t, "something landed after the end")
			}
			whole = whole[1:]
		})
	}
}

// requireStopped wants the error of a limit, or of a connection that had to go for it.
func requireStopped(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, engine.ErrPeerLost) {
		require.ErrorIs(t, err, engine.ErrTimeout)
	}
}

// stands is the backend of a child process. A byte on the input of the process has its next batch
// of bytes stand before it is submitted, and a further byte lets that go on.
type stands struct {
	driver.Backend
	asked   atomic.Bool
	goOn    chan struct{}
	request atomic.Uint64 // which the process hands over
}

type standsPeer struct {
	driver.Peer
	s *stands
}

func newStands(b driver.Backend) *stands {
	s := &stands{Backend: b, goOn: make(chan struct{})}
	go func() {
		var one [1]byte
		for stand := true; ; stand = !stand {
			if _, err := os.Stdin.Read(one[:]); err != nil {
				return
			}
			if stand {
				s.asked.Store(true)
			} else {
				s.goOn <- struct{}{}
			}
		}
	}()
	return s
}

func (s *stands) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := s.Backend.Connect(ctx, addr)
	return &standsPeer{p, s}, err
}

func (p *standsPeer) Submit(tag uint64, b *driver.Batch) error {
	if (len(b.Descs) > 0 || b.Pattern != nil) && p.s.asked.Swap(false) {
		fmt.Println("stands in", p.s.request.Load())
		<-p.s.goOn
		defer fmt.Println("has gone on")
	}
	return p.Peer.Submit(tag, b)
}

// child is such a process.
type child struct {
	*os.Process
	in  io.Writer
	out *bufio.Reader
}

// startChild starts this test binary with a flag. The test's end kills it.
func startChild(t *testing.T, flag, value string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], flag, value)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // "signal: killed"
	})
	return &child{cmd.Process, in, bufio.NewReader(out)}
}

// stand asks the process to.
func (c *child) stand(t *testing.T) {
	t.Helper()
	_, err := c.in.Write([]byte{1})
	require.NoError(t, err)
}

// stood gives the request in which the process stands, once it does. It is closed without one if
// the process ends instead, or does not come to that.
func (c *child) stood() <-chan uint64 {
	in := make(chan uint64, 1)
	go func() {
		defer close(in)
		var request uint64
		if c.hear("stands in %d\n", &request) == nil {
			in <- request
		}
	}()
	return in
}

// letGo lets it go on, and waits until it has submitted.
func (c *child) letGo(t *testing.T) {
	t.Helper()
	c.stand(t)
	require.NoError(t, c.hear("has gone on\n"))
}

func (c *child) hear(format string, args ...any) error {
	over := time.AfterFunc(limit, func() { _ = c.Kill() })
	defer over.Stop()
	line, err := c.out.ReadString('\n')
	if err == nil {
		_, err = fmt.Sscanf(line, format, args...)
	}
	return err
}
