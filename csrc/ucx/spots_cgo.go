// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#include <stdlib.h>
#include "ucx.h"
*/
import "C"

import (
	"errors"
	"os"
	"sync/atomic"
	"time"
	"unsafe"
)

// The spots of Spots.Park: between a check of a thread and the act that relies on it.
const (
	AtNone   = C.SL_UCX_AT_NONE   // parks no thread any more
	AtCopy   = C.SL_UCX_AT_COPY   // ticket and age of a write were good; the copy follows
	AtAnswer = C.SL_UCX_AT_ANSWER // the ticket of a read was good; the answer is copied next
)

// Spots lets a test stop a thread of C, which holds its worker's lock meanwhile.
type Spots struct {
	c                          *C.struct_sl_ucx_spots
	came, come, leave, leaving *os.File // came and leaving are the test's ends
}

// NewSpots makes spots; Close gives them back, after the contexts that know them.
func NewSpots() (*Spots, error) {
	s := &Spots{}
	var err error
	if s.came, s.come, err = os.Pipe(); err != nil {
		return nil, err
	}
	if s.leave, s.leaving, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, s.came.Close(), s.come.Close())
	}
	s.c = (*C.struct_sl_ucx_spots)(C.calloc(1, C.sizeof_struct_sl_ucx_spots))
	s.c.came, s.c.leave = C.int(s.come.Fd()), C.int(s.leave.Fd()) // blocking from now on
	return s, nil
}

// Park has the next thread that comes to a spot stand there.
func (s *Spots) Park(spot int) {
	(*atomic.Int32)(unsafe.Pointer(&s.c.spot)).Store(int32(spot))
}

// Await returns when a thread stands.
func (s *Spots) Await() error {
	_, err := s.came.Read(make([]byte, 1))
	return err
}

// Leave has it go on.
func (s *Spots) Leave() error {
	_, err := s.leaving.Write([]byte{1})
	return err
}

// Close gives the spots back.
func (s *Spots) Close() error {
	C.free(unsafe.Pointer(s.c))
	return errors.Join(s.came.Close(), s.come.Close(), s.leave.Close(), s.leaving.Close())
}

// Sends is how many messages UCX has not yet put into the peer's queue.
func (n *Conn) Sends() int { return int(C.sl_ucx_sends(n.c)) }

// Elapse moves the clock of all contexts of this process on, and has this one look at once for what
// is late by it. The others take the time for a standstill of their own.
func (c *Context) Elapse(d time.Duration) { C.sl_ucx_elapse(c.c, C.uint64_t(d)) }

// clock is that clock, in ns.
func clock() uint64 { return uint64(C.sl_ucx_now()) }
