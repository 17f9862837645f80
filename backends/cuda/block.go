// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"os"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/internal/lentmem"
)

// ownBlock is memory of AllocDevice.
type ownBlock struct {
	once    sync.Once
	block   *gpu.Block
	fd      int  // of its dma-buf; -1: none
	peers   bool // processes beside this one may map it
	ordinal int

	users  atomic.Int64 // batches and sums of this process
	moving atomic.Bool  // other memory goes under the addresses, or none: nothing may begin

	renewing sync.Mutex // held while other memory is put there

	mu sync.Mutex // guards what follows, and the block while it is shared
	id uint64     // of the memory that is there now, of all that this process ever had
}

// blockIDs numbers memory.
var blockIDs atomic.Uint64

// blockTable finds blocks by address.
type blockTable struct {
	mu   sync.RWMutex
	list []*ownBlock // by address
}

// blocks is one for the process, as the driver is.
var blocks blockTable

// after returns the index of the first block that begins past an address.
// Preconditions: t.mu is held.
func (t *blockTable) after(at uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].block.At > at })
}

func (t *blockTable) add(o *ownBlock) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = slices.Insert(t.list, t.after(o.block.At), o)
}

func (t *blockTable) remove(o *ownBlock) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = slices.DeleteFunc(t.list, func(other *ownBlock) bool { return other == o })
}

// find returns the block that has all of a range, nil: none has.
func (t *blockTable) find(at, n uint64) *ownBlock {
	t.mu.RLock()
	defer t.mu.RUnlock()
	i := t.after(at) - 1
	if i < 0 {
		return nil
	}
	o := t.list[i]
	if from := at - o.block.At; from > o.block.Len || n > o.block.Len-from {
		return nil
	}
	return o
}

// under returns the blocks that have a byte of a range.
func (t *blockTable) under(at, n uint64) []*ownBlock {
	t.mu.RLock()
	defer t.mu.RUnlock()
	first := t.after(at)
	if first > 0 && at-t.list[first-1].block.At < t.list[first-1].block.Len {
		first--
	}
	last := first
	for last < len(t.list) && t.list[last].block.At-min(at, t.list[last].block.At) < n {
		last++
	}
	return slices.Clone(t.list[first:last])
}

// newOwnBlock allocates. Only what no NIC knows may be mapped by other processes: a NIC holds on to
// the memory that a revoke against a frozen process replaces.
func newOwnBlock(ordinal int, n uint64, peers bool) (*ownBlock, error) {
	block, err := gpu.NewBlock(ordinal, n)
	if err != nil {
		return nil, err
	}
	o := &ownBlock{block: block, fd: -1, peers: peers, ordinal: ordinal, id: blockIDs.Add(1)}
	if peers {
		lentmem.Add(block.At, block.Len)
	}
	blocks.add(o)
	return o, nil
}

// Close implements io.Closer. It waits for the batches and sums that have entered.
func (o *ownBlock) Close() (err error) {
	o.once.Do(func() {
		o.renewing.Lock() // a renew may have outlived the Revoke that asked for it
		defer o.renewing.Unlock()
		blocks.remove(o)
		o.moving.Store(true) // for good: who found it before does not enter
		_ = await(func() bool { return o.users.Load() == 0 }, always)
		lentmem.Remove(o.block.At)
		err = o.block.Close()
		if o.fd >= 0 {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(o.fd)))
		}
	})
	return err
}

// enter reports whether a batch or a sum may begin; then it must leave. A block of nil is memory
// from elsewhere.
func (o *ownBlock) enter() bool {
	if o == nil {
		return true
	}
	o.users.Add(1) // pairs with the stores in renew and Close
	if o.moving.Load() {
		o.users.Add(-1)
		return false
	}
	return true
}

func (o *ownBlock) leave() {
	if o != nil {
		o.users.Add(-1)
	}
}

// renew puts other memory under the addresses, with the same content, so that what frozen processes
// still write lands in memory that nothing uses. Processes that are well map the other memory when
// they next use it; what they have under way is waited for. frozen says which are waited for no
// more; it is asked once more when it is our turn. The driver's part has no end that is known:
// where stop ends the wait for it, it goes on, and the next renew waits for it.
func (o *ownBlock) renew(grace time.Duration, frozen func(*pass) bool, stop func() error) error {
	if err := await(o.renewing.TryLock, stop); err != nil {
		return err
	}
	list := servers()
	if !clientsAreIn(list, frozen) {
		o.renewing.Unlock()
		return nil
	}
	o.moving.Store(true) // pairs with the look in client.admit
	over := func(s *pass) bool { return s.m.block == o }
	if err := o.drain(list, grace, frozen, stop); err != nil {
		o.settle()
		return err
	}
	ended := make(chan error, 1)
	go func() {
		err := o.replace()
		if err == nil {
			for _, b := range list {
				b.disown(over)
			}
		}
		o.settle()
		ended <- err
	}()
	var err error
	done := func() bool {
		select {
		case err = <-ended:
			return true
		default:
			return false
		}
	}
	if late := await(done, stop); late != nil {
		return late
	}
	return err
}

// drain waits for the batches over the block, but for those of frozen processes, and lets
// no further ones begin: the steps moves, drain and moved of spec/cuda_processes.pml.
func (o *ownBlock) drain(list []*Backend, grace time.Duration, frozen func(*pass) bool,
	stop func() error) error {
	over := func(s *pass) bool { return s.m.block == o }
	well := func(s *pass) bool { return over(s) && !frozen(s) }
	for _, b := range list {
		b.turnPasses(over, passGood, passMoves)
	}
	deadline := time.Now().Add(patience * grace)
	err := await(func() bool {
		for _, b := range list {
			b.help()
		}
		return o.users.Load() == 0 && (!clientsAreIn(list, well) || time.Now().After(deadline))
	}, stop)
	if err != nil {
		return err
	}
	for _, b := range list {
		b.turnPasses(over, passMoves, passMoved)
	}
	return nil
}

// patience is how many times the grace the processes get that use another part of a block.
const patience = 5

func clientsAreIn(list []*Backend, which func(*pass) bool) bool {
	return slices.ContainsFunc(list, func(b *Backend) bool { return b.clientsIn(which) })
}

func (o *ownBlock) replace() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.block.Renew(); err != nil {
		return err
	}
	o.id = blockIDs.Add(1)
	return nil
}

// settle ends a renew: batches may begin again, and what was told to wait is woken.
func (o *ownBlock) settle() {
	o.moving.Store(false)
	o.renewing.Unlock()
	for _, b := range servers() {
		b.box.Alarm()
	}
}

// await looks again and again whether a condition holds; stop says when to give up.
func await(holds func() bool, stop func() error) error {
	for pause := 10 * time.Microsecond; !holds(); pause = min(2*pause, time.Millisecond) {
		if err := stop(); err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}
