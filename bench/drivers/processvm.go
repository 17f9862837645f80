// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// processVMEnd moves pieces with process_vm_writev or process_vm_readv: what a program does that
// shares no memory with its peer.
type processVMEnd struct {
	base
	memory *hostmem.Buffer
	peer   processVMCard
}

// processVMCard is where the target's memory lies.
type processVMCard struct {
	PID     int     `json:"pid"`
	Address uintptr `json:"address"`
}

func newProcessVM(args []string) (end, error) { return &processVMEnd{}, noArgs(args) }

// Open implements bench.End.
func (e *processVMEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.Host); err != nil {
		return a, err
	}
	// The ends are siblings: where Yama is, they may not reach one another unless one lets them.
	_ = unix.Prctl(unix.PR_SET_PTRACER, unix.PR_SET_PTRACER_ANY, 0, 0, 0)
	e.memory, err = hostmem.Alloc(r.Bytes, hostmem.Options{Purpose: "bench", Populate: true})
	if err != nil {
		return a, err
	}
	card, err := json.Marshal(processVMCard{os.Getpid(), addressOf(e.memory.Bytes())})
	return bench.Answer{Version: "the kernel", Card: string(card),
		Settings: "process_vm_writev and process_vm_readv, " + pages(hostmem.HugeAuto,
			e.memory)}, err
}

// Memory implements bench.End.
func (e *processVMEnd) Memory() []byte { return e.memory.Bytes() }

// Connect implements bench.End.
func (e *processVMEnd) Connect(card string) error { return json.Unmarshal([]byte(card), &e.peer) }

// vectorsMax is how many pieces the kernel takes in one call.
const vectorsMax = 1024

// Prepare implements bench.End.
func (e *processVMEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting,
	error) {
	call := unix.ProcessVMWritev
	switch op {
	case bench.OpRead:
		call = unix.ProcessVMReadv
	case bench.OpDurable:
		return nil, errDurable
	}
	near, far := make([]unix.Iovec, len(local)), make([]unix.RemoteIovec, len(local))
	for i := range local {
		near[i].Base = &slice(e.Memory(), local[i], size)[0]
		near[i].SetLen(int(size))
		far[i] = unix.RemoteIovec{Base: e.peer.Address + uintptr(remote[i])*uintptr(size),
			Len: int(size)}
	}
	return posting(func(context.Context) error {
		for first := 0; first < len(near); first += vectorsMax {
			last := min(first+vectorsMax, len(near))
			n, err := call(e.peer.PID, near[first:last], far[first:last], 0)
			if err == nil && n != (last-first)*int(size) {
				err = fmt.Errorf("moved %d of %d bytes", n, (last-first)*int(size))
			}
			if err != nil {
				return fmt.Errorf("process_vm on process %d: %w", e.peer.PID, err)
			}
		}
		return nil
	}), nil
}

func (e *processVMEnd) close() {
	if e.memory != nil {
		e.memory.Close()
	}
}
