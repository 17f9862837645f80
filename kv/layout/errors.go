// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"fmt"
)

var (
	// ErrSideVersion is what a Side of another version is refused with.
	ErrSideVersion = errors.New("KV side of another version")
	// ErrSideEncoding is what ParseSide refuses bytes with.
	ErrSideEncoding = errors.New("bad encoding of a KV side")
	// ErrRequest is what Edge.Layer refuses a request with: a table that is too short, or a
	// span that is not one.
	ErrRequest = errors.New("bad KV request")
)

// UnlikeError says why two groups of sides cannot exchange a cache. NewPlan returns it; no
// request meets it later.
type UnlikeError struct {
	Layer    int    // global number; -1: the sides as a whole
	Part     string // "" with Layer -1
	What     string // that differs: "dtype", "cell bytes", ...
	From, To string // the values of both sides
	Cure     string // what to change
}

// Error names the part, the layer, both values and the cure.
func (e *UnlikeError) Error() string {
	at := ""
	if e.Layer >= 0 {
		at = fmt.Sprintf("layer %d, part %q: ", e.Layer, e.Part)
	}
	return fmt.Sprintf("%s%s: sender has %s, receiver has %s: %s", at, e.What, e.From, e.To,
		e.Cure)
}
