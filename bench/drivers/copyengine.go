// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/bench"
	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// copyEngineEnd moves the bytes of an operation as one large copy, by the copy engine of a card,
// between one run of the card's memory and one of pinned memory of the host.
type copyEngineEnd struct {
	base
	library string // path of libcuda; empty: the system's
	card    *gpu.Device
	at      uint64 // address of the card's memory
	host    *hostmem.Buffer
}

// newCopyEngine takes what our engine beside it takes, cuda with options, and reads library=PATH.
func newCopyEngine(args []string) (end, error) {
	if len(args) != 1 {
		return nil, errors.New("want one argument, cuda with options")
	}
	e := &copyEngineEnd{}
	_, words, err := byname.Split(args[0])
	for _, w := range words {
		if path, found := strings.CutPrefix(w, "library="); found {
			e.library = path
		}
	}
	return e, err
}

// Open implements bench.End.
func (e *copyEngineEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.GPU); err != nil {
		return a, err
	}
	if err := gpu.Load(e.library); err != nil {
		return a, err
	}
	if e.card, err = gpu.Open(0); err != nil {
		return a, err
	}
	if e.at, err = e.card.Alloc(r.Bytes); err != nil {
		return a, err
	}
	e.host, err = hostmem.Alloc(r.FarBytes, hostmem.Options{Purpose: "bench", Populate: true})
	if err != nil {
		return a, err
	}
	_, err = e.card.Pin(e.host.Bytes())
	f := e.card.Facts()
	return bench.Answer{Version: fmt.Sprintf("%s at %s", f.Name, f.Bus),
		Settings: "one copy, pinned memory"}, err
}

// Far implements bench.Alone.
func (e *copyEngineEnd) Far() []byte { return e.host.Bytes() }

// Prepare implements bench.End.
func (e *copyEngineEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting,
	error) {
	bytes := size * uint64(len(local))
	host := e.Far()[uint64(remote[0])*size%(uint64(len(e.Far()))-bytes+1):][:bytes]
	return posting(func(context.Context) error {
		if op == bench.OpRead {
			return e.card.Write(e.at, host)
		}
		return e.card.Read(host, e.at)
	}), nil
}

func (e *copyEngineEnd) close() {
	if e.host != nil {
		_ = e.card.Unpin(e.host.Bytes())
		_ = e.host.Close()
	}
	if e.card != nil {
		_ = e.card.Free(e.at)
		_ = e.card.Close()
	}
}
