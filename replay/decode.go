// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

// regionName is the name of the pool's region.
const regionName = "kv"

// decode is the process that owns the pool.
type decode struct {
	c        *proc.Control
	plan     Plan
	geometry *layout.Geometry
	memory   *engine.Memory
	eng      *engine.Engine
	backends []driver.Backend // of eng
	blocks   *pool.Pool
	receiver *handoff.Receiver

	handlers sync.WaitGroup
	checker  checker
	late     lateWrites
	tier     *tier // nil: no offload

	mu  sync.Mutex
	err error // of the first handler that failed
	bad chan struct{}
}

// Decode is the decode process: it serves over the socket that the plan names.
func Decode(c *proc.Control, open OpenFunc) error {
	d := &decode{c: c, bad: make(chan struct{})}
	if err := c.Expect(kindPlan, &d.plan); err != nil {
		return err
	}
	var err error
	d.eng, d.backends, err = openEngine(open, string(DecodeSide), d.plan.Backend, d.plan.Threads,
		d.plan.patience(), d.plan.Faults[DecodeSide])
	if err != nil {
		return err
	}
	err = d.prepare()
	if err == nil {
		err = d.serve()
	}
	if d.tier != nil {
		err = errors.Join(err, d.tier.close())
	}
	err = errors.Join(err, d.eng.Close())
	if d.memory != nil {
		err = errors.Join(err, d.memory.Close())
	}
	return err
}

// prepare makes the pool.
func (d *decode) prepare() (err error) {
	if d.geometry, err = d.plan.geometry(d.plan.PoolBlocks, layout.BlockMajor); err != nil {
		return err
	}
	d.memory, err = d.eng.Alloc(d.geometry.PoolBytes(), engine.AllocOptions{Purpose: "kv-pool",
		Populate: true})
	if err != nil {
		return fmt.Errorf("allocate the pool: %w", err)
	}
	d.blocks, err = pool.New(int(d.plan.PoolBlocks))
	if err != nil {
		return err
	}
	d.checker = checker{geometry: d.geometry, memory: d.memory.Bytes()}
	d.late = lateWrites{checker: &d.checker, blocks: d.blocks, poisoned: map[uint32]int{}}
	if d.plan.Offload == nil {
		return nil
	}
	d.tier, err = newTier(d.c.Context(), &d.plan, &d.checker, d.memory, func(blocks int) {
		_ = d.c.Send(kindOffload, blocks) // if the pipe has ended, so has the context
	})
	return err
}

// serve receives requests until the parent says that there are no more.
func (d *decode) serve() (err error) {
	region, err := d.eng.Register(regionName, d.memory.Segment())
	if err != nil {
		return err
	}
	mux := handoff.NewMux(d.eng)
	defer mux.Close()
	limit := d.plan.patience()
	d.receiver, err = handoff.NewReceiver(mux, handoff.ReceiverConfig{
		Region: region, Geometry: d.geometry, Pool: d.blocks,
		Limits: handoff.Limits{MeetTimeout: limit, IdleTimeout: limit, RevokeTimeout: limit,
			NotifyTimeout: limit},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.receiver.Close()) }()
	l, err := net.Listen("unix", d.plan.Meeting)
	if err != nil {
		return fmt.Errorf("wait for the prefill process: %w", err)
	}
	defer l.Close()
	if err := d.c.Send(kindReady, nil); err != nil {
		return err
	}
	// The handshake has a time limit, which must not run while the prefill process still faults in
	// its memory.
	if err := d.c.Expect(kindStart, nil); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(d.c.Context())
	defer cancel()
	go d.eng.Serve(ctx, l) // ends with ctx; if it fails, the prefill's dial fails
	if err := d.c.Send(kindConnected, nil); err != nil {
		return err
	}
	if err := d.acceptAll(); err != nil {
		return err
	}
	r := d.sum()
	if d.tier != nil {
		if r.Offload, err = d.tier.finish(d.c.Context()); err != nil {
			return err
		}
		r.Mismatches, r.First, r.Check = d.checker.mismatches, d.checker.first, d.checker.took
	}
	return d.c.Send(kindResult, r)
}

// acceptAll handles each request in a goroutine of its own. It returns when the parent has reported
// that all requests have begun, and all have ended.
func (d *decode) acceptAll() error {
	ctx, cancel := context.WithCancelCause(d.c.Context())
	defer cancel(nil)
	noMore := errors.New("no more requests")
	finished := make(chan error, 1)
	go func() {
		finished <- d.c.Expect(kindFinish, nil)
		cancel(noMore)
	}()
	go func() {
		select {
		case <-d.bad:
			cancel(errors.New("a request failed"))
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		q, err := d.receiver.Accept(ctx)
		if err == nil {
			d.late.forget(q)
			d.handlers.Go(func() { d.handle(q) })
		} else if ctx.Err() == nil {
			return err
		}
	}
	d.handlers.Wait()
	if err := d.failure(); err != nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, noMore) {
		return cause
	}
	return <-finished
}

func (d *decode) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *decode) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = err
		close(d.bad)
	}
}

// handle follows one request to its end, cancels it as planned, and checks it.
func (d *decode) handle(q *handoff.Request) {
	defer q.Release()
	abort, planned := d.plan.Aborts[requestOf(q)]
	arrived := 0
	for range q.Ready() {
		if planned && abort.By == DecodeSide && arrived == abort.Layer {
			if err := q.Cancel(d.c.Context()); err != nil {
				d.fail(fmt.Errorf("cancel request %d: %w", requestOf(q)+1, err))
			}
		}
		arrived++
	}
	<-q.Done()
	err := q.Err()
	switch {
	case err == nil:
		d.checker.request(q)
		if d.tier != nil {
			if err := d.tier.request(d.c.Context(), q); err != nil {
				d.fail(err)
			}
		}
		d.through(q)
	case planned && (errors.Is(err, engine.ErrAborted) || errors.Is(err, handoff.ErrCancelled)),
		d.plan.faulty():
		d.through(q) // the next request may take the blocks before late.freed does
		d.late.freed(q)
	default:
		d.fail(err)
	}
}

// requestOf returns a request's index in Plan.Requests: see prefill.handOver.
func requestOf(q *handoff.Request) int { return int(uint32(q.ID)) }

// through lets the prefill go on.
func (d *decode) through(q *handoff.Request) {
	_ = d.c.Send(kindChecked, requestOf(q)) // if the pipe has ended, so has the context
}

// sum makes the report, after the last check for late writes.
func (d *decode) sum() DecodeResult {
	time.Sleep(lateWait)
	d.late.last()
	s := d.blocks.Stats()
	c := &d.checker
	return DecodeResult{
		Memory: "host", Checked: c.checked, Watched: d.late.count,
		Mismatches: c.mismatches, First: c.first, Check: c.took,
		Leaked: uint64(s.Used) + d.receiver.Stats().Quarantined, Faults: faultsFired(d.backends),
	}
}
