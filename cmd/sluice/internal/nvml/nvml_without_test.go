// SPDX-License-Identifier: Apache-2.0

//go:build !cgo || !linux

package nvml

import (
	"errors"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

func TestWithout(t *testing.T) {
	var missing *driver.UnavailableError
	if f, err := Examine(""); !errors.As(err, &missing) || missing.Backend != "nvml" ||
		missing.Fix == "" || len(f.GPUs) != 0 {
		t.Errorf("%+v, %v", f, err)
	}
}
