// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bytes"
	"fmt"
	"math"
)

// Draw draws the misses of a layer by step, with a warm-up and without, as an SVG.
func Draw(s Spike) []byte {
	const left, right, top, bottom = 60, 620, 30, 260
	steps := max(len(s.Warm), len(s.Cold))
	x := func(step int) float64 { return left + float64(right-left)*float64(step)/float64(steps-1) }
	y := func(misses float64) float64 { // the logarithm, from 10 to 10,000
		return bottom - (math.Log10(max(misses, 10))-1)*(bottom-top)/3
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" `+
		`font-family="sans-serif" font-size="12">`+"\n"+
		`<rect width="760" height="300" fill="#fff"/>`+"\n")
	for _, misses := range []float64{10, 100, 1000, 10000} {
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" `+
			`text-anchor="end">%v</text>`+"\n", left, y(misses), right, left-6, y(misses)+4, misses)
	}
	for step := 0; step < steps; step += max(1, steps/10) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(step),
			bottom+18, step)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">step</text>`+"\n"+
		`<text x="%d" y="18">misses of a layer, 6,400 slots, 32 K, MTP 2</text>`+"\n",
		(left+right)/2, bottom+36, left)
	label := func(at, misses float64, color, text string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" fill="%s">%s</text>`+"\n", at+8, y(misses)+4,
			color, text)
	}
	fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#888" stroke-dasharray="4"/>`+"\n", left, y(200),
		right)
	label(right, 200, "#888", "200, the report")
	for _, line := range []struct {
		misses []float64
		color  string
	}{{s.Cold, "#d55e00"}, {s.Warm, "#0072b2"}} {
		fmt.Fprint(&b, `<polyline fill="none" stroke-width="2" stroke="`, line.color, `" points="`)
		for step, misses := range line.misses {
			fmt.Fprintf(&b, "%.1f,%.1f ", x(step), y(misses))
		}
		fmt.Fprint(&b, `"/>`+"\n")
	}
	label(x(0), s.Cold[0], "#d55e00", "without warm-up")
	label(right, s.Warm[len(s.Warm)-1], "#0072b2", "warmed up")
	fmt.Fprintln(&b, "</svg>")
	return b.Bytes()
}
