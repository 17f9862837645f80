// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/ring"
)

// errArgument is the class of errors for calls with an invalid argument.
var errArgument = errors.New("argument")

// argument returns an errArgument with a text.
func argument(format string, args ...any) error {
	return &argumentError{fmt.Sprintf(format, args...)}
}

type argumentError struct{ text string }

func (e *argumentError) Error() string        { return e.text }
func (e *argumentError) Is(target error) bool { return target == errArgument }

// codes maps errors to codes. The first one that an error matches counts: an error may match
// several.
var codes = []struct {
	err  error
	code C.int
}{
	{errArgument, C.SLUICE_ERR_ARGUMENT},
	// before what it wraps: by this code bindings keep memory
	{engine.ErrUnproven, C.SLUICE_ERR_UNPROVEN},
	// before what it wraps: the caller is to take none of the blocks as loaded
	{cluster.ErrTokenLost, C.SLUICE_ERR_MISSING},
	{engine.ErrNoRoute, C.SLUICE_ERR_NO_ROUTE},
	{engine.ErrUnavailable, C.SLUICE_ERR_UNAVAILABLE},
	{engine.ErrRevoked, C.SLUICE_ERR_REVOKED},
	{driver.ErrBadToken, C.SLUICE_ERR_TOKEN},
	{driver.ErrReadOnly, C.SLUICE_ERR_READ_ONLY},
	{engine.ErrAborted, C.SLUICE_ERR_ABORTED},
	{engine.ErrPeerLost, C.SLUICE_ERR_PEER_LOST},
	{ring.ErrFull, C.SLUICE_ERR_FULL}, // before the timeout that it wraps
	{engine.ErrTimeout, C.SLUICE_ERR_TIMEOUT},
	{context.DeadlineExceeded, C.SLUICE_ERR_TIMEOUT},
	{engine.ErrClosed, C.SLUICE_ERR_CLOSED},
	{engine.ErrFull, C.SLUICE_ERR_FULL},
	{cache.ErrNoRoom, C.SLUICE_ERR_FULL},
	{ring.ErrKnown, C.SLUICE_ERR_BUSY},
	{ring.ErrMiss, C.SLUICE_ERR_MISSING},
	{engine.ErrBusy, C.SLUICE_ERR_BUSY},
	{engine.ErrBounds, C.SLUICE_ERR_BOUNDS},
	{engine.ErrFault, C.SLUICE_ERR_FAULT},
	{engine.ErrCorrupt, C.SLUICE_ERR_CORRUPT},
	{engine.ErrVersion, C.SLUICE_ERR_VERSION},
	{engine.ErrNotSupported, C.SLUICE_ERR_NOT_SUPPORTED},
	{handoff.ErrCancelled, C.SLUICE_ERR_ABORTED},
	{handoff.ErrRefused, C.SLUICE_ERR_FULL},
	{handoff.ErrGeometry, C.SLUICE_ERR_ARGUMENT},
	{handoff.ErrSpan, C.SLUICE_ERR_ARGUMENT},
	{layout.ErrMismatch, C.SLUICE_ERR_CORRUPT},
	{layout.ErrRequest, C.SLUICE_ERR_BOUNDS},
	{layout.ErrGeometry, C.SLUICE_ERR_ARGUMENT},
	{layout.ErrSideVersion, C.SLUICE_ERR_VERSION},
}

func codeOf(err error) C.int {
	if _, ok := errors.AsType[*staleError](err); ok {
		return C.SLUICE_ERR_HANDLE
	}
	if _, ok := errors.AsType[*byname.Error](err); ok {
		return C.SLUICE_ERR_ARGUMENT
	}
	if _, ok := errors.AsType[*layout.UnlikeError](err); ok {
		return C.SLUICE_ERR_ARGUMENT
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return C.SLUICE_ERR_SYSTEM
}

// answer returns the code of err, which exported functions return, and writes its text to f.
func answer(f *C.struct_slgo_fault, err error) C.int {
	if err == nil {
		return C.SLUICE_OK
	}
	setText(f, plainText(err))
	return codeOf(err)
}
