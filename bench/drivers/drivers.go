// SPDX-License-Identifier: Apache-2.0

// Package drivers has the participants that are written in Go: each is one end of an engine, or of
// what an engine is measured beside, driven by the requests of package bench. "sluice bench driver
// NAME ARGS" runs one; the harness starts it.
//
//	engine BACKEND... [foreign] [only=BACKEND] [dir=DIR]  ours, but for lane weights
//	memcpy [huge]                                         lanes process, host and gpu
//	sparse                                                a pool of entries on lane process
//	sockets [CONNECTIONS]                                 lanes host and tcp
//	perftest                                              ucx_perftest on host and tcp; rdma
//	file DIR                                              keeps the file of lane file
//	fio, pread                                            lane file; fio on cache-disk
//	cache each|first|own|dir=DIR BACKEND...               ours on lanes cache-…
//	redis                                                 lanes cache-shm and cache-tcp
//	weights DIR, weights-mmap DIR, weights-fio DIR        lane weights
//	gather cuda[:OPTION=VALUE,...]                        lane gpu
//
// A new one is a file with a bench.End, and a line in byName.
package drivers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/bench"
)

// end is an end that gives back what it holds.
type end interface {
	bench.End
	close()
}

// byName has the function that opens the driver of each name.
var byName = map[string]func(args []string) (end, error){
	"cache":        newCache,
	"copy-engine":  newCopyEngine,
	"engine":       newEngine,
	"file":         newFile,
	"fio":          plain[fioEnd],
	"memcpy":       newMemcpy,
	"perftest":     plain[perftestEnd],
	"pread":        plain[preadEnd],
	"redis":        plain[redisEnd],
	"sockets":      newSockets,
	"sparse":       newSparse,
	"weights":      newWeights("ours"),
	"weights-fio":  newWeights("fio"),
	"weights-mmap": newWeights("mmap"),
}

// Run has the driver of that name answer requests on descriptor 3 by answers on descriptor 4, until
// the harness closes its end or ctx ends.
func Run(ctx context.Context, name string, args []string) error {
	open, ok := byName[name]
	if !ok {
		return fmt.Errorf("no driver %q: there are %s", name,
			strings.Join(slices.Sorted(maps.Keys(byName)), ", "))
	}
	e, err := open(args)
	if err != nil {
		return fmt.Errorf("driver %s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() {
		err := bench.Serve(e)
		e.close() // an engine says goodbye, and takes its files along
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done(): // what it does for the harness is in no order for a goodbye
		return context.Cause(ctx)
	}
}

// plain opens a driver whose end is the zero T, and which takes no arguments.
func plain[T any, E interface {
	*T
	end
}](args []string) (end, error) {
	return E(new(T)), noArgs(args)
}

// noArgs returns an error if there are arguments.
func noArgs(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q", args[0])
	}
	return nil
}

// base has the default methods of an end: no memory, no peer, no messages.
type base struct{}

func (base) Memory() []byte       { return nil }
func (base) Connect(string) error { return nil }
func (base) close()               {}

func (base) Prepare(string, uint64, []int32, []int32) (bench.Posting, error) {
	return nil, noPeer()
}

func (base) Notify([]byte) error    { return noPeer() }
func (base) Receive() (bool, error) { return false, noPeer() }

func noPeer() error { return fmt.Errorf("it has no peer: %w", bench.ErrUnsupported) }

// posting is a Posting that holds nothing to give back.
type posting func(ctx context.Context) error

func (p posting) Post(ctx context.Context) error { return p(ctx) }
func (posting) Close() error                     { return nil }

// measuring is a Posting that measures itself: it returns how long one operation took.
type measuring func(ctx context.Context) (time.Duration, error)

func (m measuring) Measure(ctx context.Context) (time.Duration, error) { return m(ctx) }
func (measuring) Close() error                                         { return nil }

func (m measuring) Post(ctx context.Context) error {
	_, err := m(ctx)
	return err
}

// slice returns the piece in a slot.
func slice(memory []byte, slot int32, size uint64) []byte {
	return memory[uint64(slot)*size:][:size]
}

// adjacent reports whether slots lie side by side, in order.
func adjacent(slots []int32) bool {
	for i, s := range slots {
		if s != slots[0]+int32(i) {
			return false
		}
	}
	return true
}

func unsigned(slots []int32) []uint32 {
	list := make([]uint32, len(slots))
	for i, s := range slots {
		list[i] = uint32(s)
	}
	return list
}

// onlyLane refuses a lane that a driver is not for.
func onlyLane(r *bench.Request, lanes ...bench.Lane) error {
	if !slices.Contains(lanes, bench.Lane(r.Lane)) {
		return fmt.Errorf("it is for lanes %v: %w", lanes, bench.ErrUnsupported)
	}
	return nil
}
