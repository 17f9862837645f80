// SPDX-License-Identifier: Apache-2.0

//go:build !cgo || !linux

package nvml

// Examine needs C, which this build has not.
func Examine(string) (Findings, error) {
	return Findings{}, unavailable("this build cannot call NVML", "build on Linux with "+
		"CGO_ENABLED=1")
}
