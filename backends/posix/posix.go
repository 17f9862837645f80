// SPDX-License-Identifier: Apache-2.0

// Package posix moves bytes between host memory and files or block devices of one
// process: a File segment is a region like any other.
//
// A batch becomes requests (plan.go): whole blocks go past the page cache, straight
// between the disk and the program's memory; the rest of a read comes through
// aligned buffers of the backend, the rest of a write through the page cache. A bounded
// table of requests is with the kernel at any time, by io_uring (ring.go) or, where that is
// refused, by threads that call preadv and pwritev (pool.go). One mutex guards what is under way
// (serve.go); no byte is moved and no system call is made under it.
//
// # The page cache
//
// Blocks that were written past the page cache and bytes that were written through it may
// share a page only one after the other: the backend never has both kinds of write to one
// file under way at once. A program that writes a file by other means beside the backend
// has to keep clear of the pages that the backend writes.
//
// # What proves that nothing lands later
//
// Only this process reaches a file, and nothing is with the kernel that is not
// in the table: Revoke, Cancel and Close start nothing more, cancel what is under way
// and wait for its end. A disk that does not answer holds them up, as nothing in user space
// ends a request that a disk has.
package posix

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
	"github.com/sluicehq/sluice/internal/proc"
)

// Backend implements driver.Backend.
type Backend struct {
	driver.BackendBase
	cfg     Config
	flights ownfiles.Flights[extent] // Gate: the users of the mover
	event   *proc.Event              // for a caller that has armed
	mover   mover
	choice  string // which mover, and why
	armed   atomic.Bool
	armings atomic.Uint64 // calls of Arm
	doubt   atomic.Uint64 // the call since which the kernel tells the sleeper of a landing; 0: none

	// Guarded by flights.Mu, under which no system call is made but in cold calls.
	files    map[fileKey]*file
	inodes   map[inodeKey]*inode
	jobs     []job
	requests []request
	free     []*request
	again    []*request // to be handed to the mover once more
	trays    []*tray
	unsynced []*inode // jobs wait for a sync that has not begun
	durables int      // jobs that end with a sync
	bounce   []byte   // bounceBytes for each request
	pinned   uint64   // bytes of registered buffers, of Config.PinMax
}

var _ driver.Backend = (*Backend)(nil)

// New opens a backend. With PathRing it answers *driver.UnavailableError where the kernel
// refuses io_uring.
func New(cfg Config) (*Backend, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("posix: %w", err)
	}
	b := &Backend{cfg: cfg, files: map[fileKey]*file{}, inodes: map[inodeKey]*inode{}}
	b.flights.Open(ownfiles.Config[extent]{Name: "posix", Memory: "host memory", Mover: "the disk",
		KeysMax: cfg.KeysMax,
		JobsMax: cfg.JobsMax, Can: can, DescsMax: descsMax, RunsMax: runsMax,
		Take: b.take, First: b.first, Room: b.room, Cut: b.begin, Ends: b.finish,
		Stop: b.stop, Leave: b.leave, Release: b.giveBack})
	if err := b.open(); err != nil {
		return nil, errors.Join(err, b.release())
	}
	return b, nil
}

func (b *Backend) open() (err error) {
	if b.event, err = proc.NewEvent(); err != nil {
		return fmt.Errorf("posix: %w", err)
	}
	if b.bounce, err = mapAnonymous(b.cfg.Depth * bounceBytes); err != nil {
		return fmt.Errorf("posix: map %d buffers: %w", b.cfg.Depth, err)
	}
	b.jobs = make([]job, b.cfg.JobsMax)
	for i := range b.jobs {
		j := &b.jobs[i]
		j.Slot = i
		b.flights.Add(&j.Job)
	}
	b.requests = make([]request, b.cfg.Depth)
	b.free = make([]*request, 0, b.cfg.Depth)
	b.again = make([]*request, 0, b.cfg.Depth)
	for i := range b.requests {
		r := &b.requests[b.cfg.Depth-1-i]
		r.slot = b.cfg.Depth - 1 - i
		r.buffer = b.bounce[r.slot*bounceBytes:][:bounceBytes:bounceBytes]
		b.free = append(b.free, r)
	}
	b.mover, b.choice, err = openMover(b)
	return err
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return caps() }

// Addr implements driver.Backend. It opens nothing in another process.
func (b *Backend) Addr() []byte { return b.flights.Addr() }

// Choice says by what the requests reach the kernel, and why, in a few words.
func (b *Backend) Choice() string { return b.choice }

// Pinned returns the bytes of memory that are registered with io_uring: those of
// Config.PinMax that are taken.
func (b *Backend) Pinned() uint64 {
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
	return b.pinned
}

// Close implements driver.Backend. It waits for what the disks have in hand.
func (b *Backend) Close() error {
	return b.flights.Close(b.release)
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if b.mover != nil {
		errs = append(errs, b.mover.close())
	}
	if b.bounce != nil {
		errs = append(errs, unmap(b.bounce))
	}
	if b.event != nil {
		errs = append(errs, b.event.Close())
	}
	return errors.Join(errs...)
}
