// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/driver"
)

// The variants: ways to perform a Move between the host and a card.
const (
	// VariantAsync is the kernel that copies asynchronously through shared memory.
	VariantAsync = "async"
	// VariantRows is the kernel that copies through registers.
	VariantRows = "rows"
	// VariantLoop has the copy engine move each run of neighbours, by a call for each.
	VariantLoop = "loop"
	// VariantStaged has the CPU gather into a ring of pinned memory, from which the copy engine
	// takes whole pieces; or the reverse.
	VariantStaged = "staged"
)

// Variants returns all of them by name; where nothing is measured, those before are preferred.
func Variants() []string {
	return []string{VariantAsync, VariantRows, VariantStaged, VariantLoop}
}

// VariantError says why a variant does not serve a Move.
type VariantError struct {
	Variant string
	Reason  string
	// Err is ErrBudget where the budget is the reason, else driver.ErrNotSupported.
	Err error
}

// Error names the variant and the reason.
func (e *VariantError) Error() string { return "variant " + e.Variant + ": " + e.Reason }

// Unwrap returns Err.
func (e *VariantError) Unwrap() error { return e.Err }

func unfit(variant, reason string) error {
	return &VariantError{variant, reason, driver.ErrNotSupported}
}

// Candidate is what a Choice knows of one variant.
type Candidate struct {
	Variant string  `json:"variant"`
	GBps    float64 `json:"gbps"` // measured, of the first entries of a Move; 0: not
	// why it was not measured; "" if it was or is the only one
	Reason string `json:"reason,omitempty"`
	serves bool
}

// Choice is which variant a Device takes for Moves of one kind, and why.
type Choice struct {
	Variant    string      `json:"variant"`
	Why        string      `json:"why"`
	Candidates []Candidate `json:"candidates"` // all variants

	passing bool // there was nothing to measure by: the next Move of this kind may have
}

// String is the choice and the reasons on one line.
func (c *Choice) String() string { return c.Variant + ": " + c.Why }

// explain makes Why of the candidates.
func (c *Choice) explain() {
	var measured, others []string
	for i := range c.Candidates {
		p := &c.Candidates[i]
		switch {
		case p.GBps > 0:
			measured = append(measured, fmt.Sprintf("%s %.1f GB/s", p.Variant, p.GBps))
		case p.Variant != c.Variant:
			others = append(others, p.Variant+": "+p.Reason)
		}
	}
	switch {
	case c.Why != "":
	case measured != nil:
		c.Why = "measured: " + strings.Join(measured, ", ")
	default:
		c.Why = "the only one that serves"
	}
	if others != nil {
		c.Why += "; " + strings.Join(others, "; ")
	}
}

// reason is what an error of a variant says behind its name.
func reason(err error) string {
	var v *VariantError
	if errors.As(err, &v) {
		return v.Reason
	}
	return err.Error()
}

// kernelOf is the kernel of a variant; "" where it has none.
func kernelOf(variant string) string {
	switch variant {
	case VariantAsync:
		return KernelAsync
	case VariantRows:
		return KernelRows
	}
	return ""
}

func knownVariant(name string) error {
	switch name {
	case VariantAsync, VariantRows, VariantLoop, VariantStaged:
		return nil
	}
	return unfit(name, "there is none of that name: there are "+strings.Join(Variants(), ", "))
}
