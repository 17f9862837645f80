// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
)

// preadEnd has threads call pread or pwrite, a piece each time, through the page cache: what a
// program does that knows no other way.
type preadEnd struct {
	base
	memory []byte
	file   *os.File
}

// preadThreads is how many.
const preadThreads = 32

// Open implements bench.End.
func (e *preadEnd) Open(r *bench.Request) (bench.Answer, error) {
	e.memory = make([]byte, r.Bytes)
	return bench.Answer{Version: "the kernel", Settings: "32 threads, through the page cache"},
		onlyLane(r, bench.File)
}

// Memory implements bench.End.
func (e *preadEnd) Memory() []byte { return e.memory }

// Connect implements bench.End.
func (e *preadEnd) Connect(card string) (err error) {
	c, err := readFileCard(card)
	if err == nil {
		e.file, err = os.OpenFile(c.Path, os.O_RDWR, 0)
	}
	return err
}

// Prepare implements bench.End.
func (e *preadEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	call := e.file.WriteAt
	if op == bench.OpRead {
		call = e.file.ReadAt
	}
	return posting(func(context.Context) error {
		var errs [preadThreads]error
		var all sync.WaitGroup
		for t := range errs {
			all.Go(func() {
				for i := t; i < len(local) && errs[t] == nil; i += preadThreads {
					_, errs[t] = call(slice(e.memory, local[i], size),
						int64(remote[i])*int64(size))
				}
			})
		}
		all.Wait()
		if op == bench.OpDurable {
			errs[0] = errors.Join(errs[0], unix.Fdatasync(int(e.file.Fd())))
		}
		return errors.Join(errs[:]...)
	}), nil
}

func (e *preadEnd) close() {
	if e.file != nil {
		e.file.Close()
	}
}
