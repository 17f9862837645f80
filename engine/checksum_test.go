// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// carriers are the backends over which checksums are tested.
var carriers = map[string]func() (driver.Backend, error){
	"mem": func() (driver.Backend, error) { return mem.New(mem.Config{}) },
	"shm": func() (driver.Backend, error) { return shm.New(shm.Config{}) },
	"tcp": func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	},
}

// sumEnd is an engine with one region.
type sumEnd struct {
	*engine.Engine
	r *engine.Region
	b driver.Backend
}

func (e *sumEnd) mem() []byte { return e.r.Bytes() }

// newSumEnd opens one over a carrier, with faults where rules are given.
func newSumEnd(t testing.TB, name, carrier string, rules []fault.Rule, n uint64,
	change ...func(*engine.Config)) *sumEnd {
	t.Helper()
	b, err := carriers[carrier]()
	if err == nil && len(rules) > 0 {
		b, err = fault.Wrap(b, 5, rules...)
	}
	require.NoError(t, err)
	cfg := engine.Config{Name: name, Backends: []driver.Backend{b}, AbortGrace: 30 * time.Second,
		Spin: virtual.Spin()}
	for _, f := range change {
		f(&cfg)
	}
	e, err := engine.Open(cfg)
	require.NoError(t, err)
	m, err := e.Alloc(n, engine.AllocOptions{Purpose: "test"})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
		if m != nil {
			_ = m.Close() // nobody sums it any more
		}
	})
	require.NoError(t, err)
	r, err := e.Register(name, m.Segment())
	require.NoError(t, err)
	source := rand.NewChaCha8([32]byte{byte(len(name))})
	_, _ = source.Read(r.Bytes())
	return &sumEnd{e, r, b}
}

func (e *sumEnd) connect(t testing.TB, to *sumEnd) (*engine.Peer, *engine.Remote) {
	t.Helper()
	d, err := to.Describe()
	require.NoError(t, err)
	p, err := e.Connect(t.Context(), d)
	require.NoError(t, err)
	m, err := p.Remote(to.r.Name())
	require.NoError(t, err)
	return p, m
}

func checked(t testing.TB, e *sumEnd, p *engine.Peer, op engine.Op) *engine.Transfer {
	t.Helper()
	x, err := e.NewTransfer(p, op, engine.Route{})
	if err == nil {
		err = x.Checksum()
	}
	require.NoError(t, err)
	return x
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wait bounds the wait for a transfer that is posted.
func wait(t testing.TB, x *engine.Transfer) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := x.Wait(ctx)
	if ctx.Err() != nil {
		t.Fatal("the transfer does not end")
	}
	return err
}

const sumSize = 12 << 20

// Bytes that arrive as they were sent are done, in every shape, and what follows them comes.
func TestChecksum(t *testing.T) {
	for carrier := range carriers {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			t.Run(carrier+"/"+op.String(), func(t *testing.T) {
				leak.Check(t, hostmem.InUse)
				near, far := newSumEnd(t, "near", carrier, nil, sumSize),
					newSumEnd(t, "farther", carrier, nil, sumSize)
				p, m := near.connect(t, far)
				x := checked(t, near, p, op)
				indices := make([]uint32, 3000)
				for i := range indices {
					indices[i] = uint32((i * 7) % 4000)
				}
				must(t, x.Add(near.r, 0, m, 1, 5<<20+1)) // several parts
				for i := range uint64(4000) {            // more than one request holds
					must(t, x.Add(near.r, 6<<20+i*100, m, 6<<20+i*120, 90))
				}
				must(t, x.AddPages(near.r, m, engine.Pages{EntryLen: 656, Count: len(indices),
					LocalBase: 7 << 20, LocalStride: 656, RemoteBase: 8 << 20, RemoteStride: 700,
					Remote: indices}))
				must(t, x.AddPages(near.r, m, engine.Pages{EntryLen: 8, Count: 2000,
					LocalBase: 10 << 20, LocalStride: 8, RemoteBase: 11 << 20, RemoteStride: 16}))
				must(t, x.Notify([]byte("done")))
				for range 3 { // posted anew it is compared anew
					must(t, x.Post())
					must(t, wait(t, x))
					select {
					case n := <-far.Notifications():
						if string(n.Data) != "done" {
							t.Errorf("notification %q (%v)", n.Data, n.Err)
						}
					case <-time.After(30 * time.Second):
						t.Fatal("no notification")
					}
				}
				if !bytes.Equal(near.mem()[:5<<20+1], far.mem()[1:5<<20+2]) ||
					!bytes.Equal(near.mem()[7<<20:7<<20+656], far.mem()[8<<20:8<<20+656]) {
					t.Error("other bytes")
				}
				must(t, x.Reset())
				must(t, x.Add(near.r, 0, m, 0, 4096)) // without
				must(t, x.Post())
				must(t, wait(t, x))
			})
		}
	}
}

// An engine compares memory of its own as well.
func TestChecksumOfSelf(t *testing.T) {
	e := newSumEnd(t, "self", "mem", nil, 1<<20)
	p, err := e.Self()
	must(t, err)
	m, err := p.Remote("self")
	must(t, err)
	for _, op := range []engine.Op{engine.Write, engine.Read} {
		x := checked(t, e, p, op)
		must(t, x.Add(e.r, 0, m, 512<<10, 400<<10))
		must(t, x.Post())
		must(t, wait(t, x))
	}
}

// Wrong bytes are found and named, whatever brought them, and nothing follows them.
func TestCorruptionIsNamed(t *testing.T) {
	for carrier := range carriers {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			t.Run(carrier+"/"+op.String(), func(t *testing.T) {
				leak.Check(t, hostmem.InUse)
				on := fault.Write
				if op == engine.Read {
					on = fault.Read
				}
				near, far := newSumEnd(t, "near", carrier, []fault.Rule{{On: on, Every: 3,
					Do: fault.BreakCorrupt()}}, sumSize),
					newSumEnd(t, "farther", carrier, nil, sumSize)
				p, m := near.connect(t, far)
				corrupt, fine := 0, 0
				for i := range uint64(30) {
					off, n := i*4096, 1000+i
					x := checked(t, near, p, op)
					must(t, x.Add(near.r, 1<<20+off, m, off, n))
					pages := engine.Pages{EntryLen: 640, Count: 20, LocalBase: 2<<20 + i*20*640,
						LocalStride: 640, RemoteBase: 3 << 20, RemoteStride: 640 * 40,
						Remote: make([]uint32, 20)}
					for j := range pages.Remote {
						pages.Remote[j] = uint32(j)
					}
					must(t, x.AddPages(near.r, m, pages))
					must(t, x.Notify([]byte{byte(i)}))
					must(t, x.Post())
					err := wait(t, x)
					var c *engine.CorruptError
					switch {
					case err == nil:
						fine++
						select {
						case got := <-far.Notifications():
							if len(got.Data) != 1 || got.Data[0] != byte(i) {
								t.Errorf("transfer %d: notification %v: one of bytes "+
									"that were wrong", i, got.Data)
							}
						case <-time.After(30 * time.Second):
							t.Fatal("no notification")
						}
						if !bytes.Equal(near.mem()[1<<20+off:][:n], far.mem()[off:][:n]) {
							t.Errorf("transfer %d: other bytes, and no error", i)
						}
					case errors.As(err, &c) && errors.Is(err, engine.ErrCorrupt):
						corrupt++
						inPages := c.Offset >= 3<<20 && c.Len == 640 &&
							(c.Offset-3<<20)%(640*40) == 0
						if c.Region != "farther" || c.Op != op || !inPages && (c.Offset != off ||
							c.Len != n) {
							t.Errorf("transfer %d names %+v", i, c)
						}
					default:
						t.Errorf("transfer %d: %v", i, err)
					}
					must(t, x.Close())
				}
				if corrupt == 0 || fine == 0 {
					t.Errorf("%d corrupt and %d fine of 30", corrupt, fine)
				}
				select {
				case got := <-far.Notifications():
					t.Errorf("notification %v of bytes that were wrong", got.Data)
				case <-time.After(50 * time.Millisecond):
				}
			})
		}
	}
}

// Memory that somebody changes in between is taken for corruption; ranges that were revoked and
// peers that are gone are named as what they are.
func TestChecksumOfWhatIsGone(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	near, far := newSumEnd(t, "near", "tcp", nil, sumSize), newSumEnd(t, "farther", "tcp", nil,
		sumSize)
	p, m := near.connect(t, far)
	x := checked(t, near, p, engine.Write)
	must(t, x.Add(near.r, 0, m, 0, 1<<20))
	must(t, x.Post())
	must(t, wait(t, x))
	must(t, far.r.Close())
	must(t, x.Post())
	if err := wait(t, x); !errors.Is(err, engine.ErrRevoked) {
		t.Errorf("a region that was closed: %v", err)
	}
	must(t, x.Close())
	must(t, far.Close())
	x, err := near.NewTransfer(p, engine.Write, engine.Route{})
	must(t, err)
	must(t, x.Checksum())
	select {
	case <-p.Lost():
	case <-time.After(30 * time.Second):
		t.Fatal("a peer that is closed is not lost")
	}
	if err := x.Add(near.r, 0, m, 0, 1); err == nil {
		t.Error("a peer that is gone took an Add")
	}
}

// Aborts and deadlines end the wait for an answer like everything else; what is posted then is
// compared as if nothing had been.
func TestChecksumIsAborted(t *testing.T) {
	for carrier := range carriers {
		t.Run(carrier, func(t *testing.T) {
			leak.Check(t, hostmem.InUse)
			// Answers are messages of the far engine: they are late, and now and then lost.
			near, far := newSumEnd(t, "near", carrier, nil, sumSize),
				newSumEnd(t, "farther", carrier, []fault.Rule{{On: fault.Batch, Chance: 0.5,
					Do: fault.Delay(3*time.Millisecond, 3*time.Millisecond)}}, sumSize)
			p, m := near.connect(t, far)
			x, y := checked(t, near, p, engine.Write), checked(t, near, p, engine.Read)
			must(t, x.Add(near.r, 0, m, 0, 6<<20))
			must(t, y.Add(near.r, 6<<20, m, 6<<20, 6<<20))
			outcomes := map[string]int{}
			for i := range 60 {
				for _, z := range []*engine.Transfer{x, y} {
					must(t, z.Post())
					time.Sleep(time.Duration(i%4) * time.Millisecond)
					if i%3 > 0 {
						must(t, z.Abort(t.Context()))
					}
					err := wait(t, z)
					if err != nil && !errors.Is(err, engine.ErrAborted) {
						t.Fatalf("%d: %v", i, err)
					}
					outcomes[fmt.Sprint(err)]++
				}
			}
			if outcomes["<nil>"] < 40 {
				t.Errorf("outcomes %v", outcomes)
			}
		})
	}
}

// An answer that never comes ends with the transfer's deadline.
func TestChecksumWithoutAnswer(t *testing.T) { virtual.Time(t, checksumWithoutAnswer) }

func checksumWithoutAnswer(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	near := newSumEnd(t, "near", "mem",
		[]fault.Rule{{On: fault.Receive, Skip: 2, Do: fault.Delay(time.Hour, 0)}}, sumSize,
		func(c *engine.Config) {
			c.TransferTimeout = 300 * time.Millisecond
		})
	far := newSumEnd(t, "farther", "mem", nil, sumSize)
	p, m := near.connect(t, far)
	x := checked(t, near, p, engine.Write)
	must(t, x.Add(near.r, 0, m, 0, 1000))
	for i := range 5 {
		must(t, x.Post())
		err := wait(t, x)
		if errors.Is(err, engine.ErrTimeout) {
			return
		}
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
	t.Error("answers came that were held back")
}
