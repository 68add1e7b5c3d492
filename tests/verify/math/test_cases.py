r"""Cases of the verifier of mathematics: each gold answer with answers that are right for it, and others that are not.

Promises: a form of docs/how_to/verify.md, of another grader's suite or of a model's writing is read whole and is right;
its neighbour, which differs by a sign, a digit, a name, a unit or a word, is wrong, and never undecided.
"""

import pytest

from stretto_verify.math.reward import gold
from tests.verify.math.judged import verdict
from tests.verify.tables import cases

#: By what they have in common, in the form of `tables.cases`.
TABLES = {
    "a number in another spelling": r"""
1000000 ✓ 1e6 ¦ 1234567 ✓ 1,234,567 ¦ 12000 ✓ 12{,}000 ✓ 12\,000 ¦ 1234 ✓ 1 234 ¦ 0.5 ✓ 2/4 ¦ $2\frac{1}{2}$ ✓ 2 1/2
$-2\frac{1}{2}$ ✓ -2.5 ¦ $2\times10^5$ ✓ 2e5 ¦ $0.\overline{3}$ ✓ 1/3 ¦ 7 ✓ +7 ¦ 0 ✓ -0 ¦ 4 ✓ ４
1000.99 ✓ 1,000.99 dollars ¦ 2 ✓ $5 \equiv 2 \pmod{3}$ ¦ $\frac{1}{2}$ ✓ $\frac{1}{2}$ or $0.5$
""",
    "an approximation of an exact value": r"""
1/3 ✓ 0.333333 ¦ $\pi$ ✓ 3.14159265
""",
    "an expression of the same value": r"""
$\frac{\pi}{2}$ ✓ pi/2 ¦ $-2\pi$ ✓ -2*pi ¦ $e^{16}-1$ ✓ exp(16)-1 ¦ $14-i$ ✓ 14.0-1.0i
$\sqrt{\frac{1}{n}}$ ✓ $\frac{1}{\sqrt{n}}$ ¦ $\sqrt{ab}$ ✓ $\sqrt a\sqrt b$ ¦ $(-1)^n$ ✓ $\cos(n\pi)$
$3\sqrt{13}$ ✓ $\sqrt{117}$ ¦ $(x+1)^2$ ✓ $x^2+2x+1$ ¦ $\frac{\pi}{6}+2k\pi$ ✓ $2\pi k+\pi/6$
$e^{i\pi/3}$ ✓ $\frac{1}{2}+\frac{\sqrt3}{2}i$ ¦ $\cos 60^\circ$ ✓ 1/2 ¦ $\sqrt[3]{-8}$ ✓ -2
""",
    "units and percentages": r"""
5 cm ✓ 5 ¦ 5 ✓ 5 cm ¦ 15 cm^2 ✓ 15\text{ square centimeters} ¦ 5.50 ✓ \$5.50 ¦ 90 ✓ $90^\circ$ ✓ 90º ¦ 28% ✓ 28 ✓ 0.28
0.28 ✓ 28\% ¦ 28.5% ✓ 28.5 percent ¦ 2 ✓ Answer: 2 kPa ✓ 2 mol/L ¦ 2 kPa ☑ 2 ¦ 5 meters ✓ five meters
5 m ☑ 500\text{ cm} ☒ 5\text{ cm} ¦ 90 minutes ✓ The answer is 1.5 hours. ¦ 1 h 30 min ☑ 90\text{ minutes} ☒ 90
36 km/h ☑ 10 \text{ m/s} ¦ 2 m^2 ☑ 20000\text{ cm}^2 ☒ 200\text{ cm}^2 ¦ 3 kg ☒ 3\text{ m} ¦ 3 ☑ 3\text{ m}
3 apples ✓ 3 pears
""",
    "names and equations": r"""
5 ✓ $x = 5$ ☑ f^{-1}(2) = 5 ¦ x=5 ✓ 5 ¦ $2x+1$ ✓ $y=2x+1$ ¦ $x=1,y=2$ ✓ $y=2,x=1$ ¦ 3x-y+13=0 ✓ y=3x+13
$f(x)=x+1$ ✓ $f(n)=n+1$ ¦ $\sqrt{2}$ ✓ $\sqrt{2} \approx 1.414$ ¦ \frac{x^3}{3} + C ☑ \frac{1}{3}x^3 + c
x = \frac{\pi}{4} + k\pi ☑ x = \frac{\pi}{4} + n\pi ¦ \frac{dy}{dx} = 2x ☑ 2x
""",
    "lists, intervals and ranges": r"""
$\{1,2,3\}$ ✓ 3, 2 and 1 ¦ $\pm 3$ ✓ $\{-3,3\}$ ¦ $(1,2),(3,4)$ ✓ (3,4) and (1,2) ¦ [1,2] ✓ $x \in [1,2]$
$1\le x\le 2$ ✓ [1,2] ¦ $x>5$ ✓ $5<x$ ✓ $(5,\infty)$ ¦ $x<1 \text{ or } x>2$ ✓ $(-\infty,1)\cup(2,\infty)$
$(-\infty,1)\cup(2,\infty)$ ✓ $(2,\infty)\cup(-\infty,1)$ ¦ 0 < x < 3 ☑ x > 0 \text{ and } x < 3
-1<x<=2 ✓ x<=2 and x>-1 ¦ (0, \infty) ☑ \mathbb{R}^+ ¦ [0, \infty) ☑ \mathbb{R}_{\ge 0} ¦ x \in (0, 3) ☑ 0 < x < 3
""",
    "matrices, ratios, words and choices": r"""
$\begin{pmatrix}1\\2\end{pmatrix}$ ✓ $\begin{bmatrix}1\\2\end{bmatrix}$ ¦ 1:2 ✓ 2:4 ¦ 12:30 ✓ 12:30
$1, 2, \ldots, n$ ✓ $1,2,\dots,n$ ¦ yes ✓ Yes. ¦ no solution ☑ \text{No solution} ¦ (C) ☑ \text{C} ¦ A ✓ \textbf{(A)} 5
B ✓ The correct option is B. ✓ B) 12 ¦ \text{Alice and Bob} ☑ \text{Bob and Alice} ¦ DNE ☑ \text{does not exist}
\text{No solution} ✓ The equation has no solution. ¦ D ✓ I would choose D.
""",
    "nearly the same as one of those above": r"""
1000000 ✗ 1e5 ¦ 1234567 ✗ 1,234,568 ¦ -7 ✗ 7 ¦ 17 ✗ 1 7 ¦ 1.5 ✗ 1,500 ¦ 1.0 ✗ 1,000 ¦ 0 ✗ 0.0000001 ¦ 6 ✗ 6!
1/3 ✗ 0.33 ¦ $\pi$ ✗ 3.14 ¦ 0.1234567 ✗ 0.1234568 ¦ 0.0000001 ✗ 0.0000002 ¦ $\frac{1}{2004!}$ ✗ $\frac{1}{2006!}$
$\frac{1}{2^{99}}$ ✗ $\frac{1}{2^{98}}$ ¦ $1 - \frac{1}{\mathrm{e}}$ ✗ $1 + \frac{1}{\mathrm{e}}$ ¦ $|x|$ ✗ $x$
$\sqrt{x^2}$ ✗ $x$ ¦ $\frac{R}{r}$ ✗ 1 ¦ $\ln 2$ ✗ $\log 2$ ¦ 5x ✗ 5 ¦ 5 cm ✗ 5 m ¦ 28% ✗ 0.28% ✗ 2.8
$101_2$ ✗ $101_3$ ¦ x=5 ✗ y=5 ¦ $x=1,y=2$ ✗ $x=2,y=1$ ¦ $x^2+y^2=4$ ✗ 4 ¦ 3x-y+13=0 ✗ 3x+4y+14=0 ¦ (1,2) ✗ (2,1)
(1,2] ✗ (1,2) ¦ $\{1,2,3\}$ ✗ $\{1,2\}$ ¦ 1331 and 1728 ✗ 1728 ¦ $\pm 3$ ✗ 3 ¦ [1,2] ✗ $1< x\le 2$ ¦ $x>5$ ✗ $x\ge 5$
✗ $[5,\infty)$ ¦ $\begin{pmatrix}1\\2\end{pmatrix}$ ✗ $\begin{pmatrix}1&2\end{pmatrix}$ ¦ 12:00 ✗ 12:30 ¦ 1:2:3 ✗ 1:3:2
$1, 2, \ldots, n$ ✗ $1, 3, 5, \ldots, 2n-1$ ¦ 42 ☒ \text{no solution} ¦ yes ✗ no ¦ A ✗ B
""",
    "what is denied or hedged": r"""
42 ✗ not 42 ✗ The answer is not 42. ✗ It is not $42$. ✗ It can't be 42. ✗ 42 is wrong. ✗ $42$ is not the answer
✗ The answer is 41, not 42. ✗ The answer is 41 rather than 42 ✗ Either 41 or 42 ✗ 41, 42 ✗ \boxed{41} or \boxed{42}
✗ \boxed{40}\boxed{41}\boxed{42} ✗ \boxed{42}. Wait, that was a mistake, it must be \boxed{41}.
✗ <answer>42</answer><answer>41</answer> ✗ I do not know. ✗ \boxed{}
""",
    "a value and its approximation or its reason": r"""
1/6 ✓ The probability is 1/6 (about 0.167). ¦ \sqrt{2} ☑ \sqrt{2} \text{ (approximately 1.414)}
✓ The answer is √2, which is approximately 1.414. ¦ \frac{1}{6} ☑ \frac{1}{6} \text{ or about } 16.67\%
5 ✓ The answer is 5 (since 2+3 = 5). ¦ 42 ☑ 42 \text{ (since 6*7=42)}
""",
    "signs of a conclusion, JSON, quotes, line breaks": r"""
12 ✓ => 12 ✓ → 12 ☑ \therefore 12 ☑ 12\\ ¦ 5 ✓ {"reasoning": "2+3", "answer": "5"} ✓ Answer: '5' ✓ 故答案为：5
✓ The answer to 2+3 is 5. ✓ I got 5. ¦ 15 ✓ **Answer:**⏎Jessica has **\$15** more. ¦ 120 ✓ The answer is _120°_.
42 ✓ The answer is <b>42</b>. ☑ Therefore, 42 ¦ unknown ☑ unknown? ¦ new york city ✓ <answer>New York City!</answer>
""",
    "fonts, names of functions, ordinals": r"""
1/2 ☑ \mathbf{\frac{1}{2}} ✓ 1⁄2 ¦ 5 ☑ \mathbf 5 ☑ 5^{\text{th}} ✓ USD 5 ¦ -5 ☑ \text{-}5 ¦ 42 ☑ \operatorname{lcm}(6,7)
\sqrt[3]{2} ☑ \sqrt[3] 2 ¦ 1/3 ✓ ⅓ ¦ 5\text{ m/s} ☑ 5\ \text{m}\cdot\text{s}^{-1}
""",
    "points with a name, memberships, functions of a line": r"""
(2,3) ☑ A(2,3) ☑ \text{vertex } (2,3) ¦ \langle 1,2 \rangle ✓ <1,2> ¦ 2,3 ☑ x=2 \lor x=3 ¦ y = 2x + 1 ✓ f(x) = 2x+1
5 ☑ 5^\circ\text{C} ☑ \text{exactly } 5
""",
    "question marks, dollar signs, values in a box of words": r"""
20 ✓ 20? ☑ 20? ✓ The answer is 20? ✓ #### 20? ✓ Is it 20? Yes. ¦ \frac{1}{2} ☑ \frac{1}{2}?
loss of $1000 ☑ \text{loss of \textdollar 1000} ¦ loss of \textdollar 1000 ☑ 1000 ¦ $1000 ✓ \textdollar{}1000
☑ \text{a loss of }\$1000 ✓ It is \textdollar1000. ¦ 42 ☑ \text{a total of }42\text{ apples}
""",
    "shares, and the last of several boxes": r"""
68% of 250.00 ☑ 170 ¦ 170 ☑ 68\%\text{ of }250 ¦ 60 ✓ It is 2/3 of 90. ¦ 72 ✓ It is 20% off 90.
34 ✓ first \boxed{12}; final \boxed{34}
""",
    "nearly the same as one of these kinds": r"""
5 ✗ 5 or about 9 ☒ x^{-1}(2) = 5 ✗ {"answer": "6", "next": "5"} ¦ 42 ✗ 42 or about 41 ✗ This is not the final answer: 42
✗ Wrong answer: 42 ✗ Final answer: 0\$42 ✗ The number is 7 (about 42). ☒ 41\text{ (since 42 is too much)} ☒ 0\text{ }42
✗ A \Rightarrow 42 ☒ x=0 \land y=42 ✗ The answer is 42? No. ✗ \boxed{42}? No, it is less. ☒ 42? 43 ☒ \text{not }42
☒ \text{log of }42 ☒ \text{twice }42 ☒ \text{more than }42 ☒ \text{option A }42 ¦ 7 ✗ The number is 7 (about 42).
0.167 ✗ The probability is 1/6 (about 0.167). ¦ 12 ✗ first \boxed{12}; final \boxed{34}
0 < x < 3 ☒ x > 0 \text{ or } x < 3 ☒ x > 0 \text{ and } y < 3 ☒ x > 3 \text{ and } x < 0 ¦ x \in (0, 3) ☒ 0 < y < 3
(0, \infty) ☒ \mathbb{R}_{\ge 0} ¦ A + C ☒ A + c ¦ \frac{x^3}{3} + C ☒ \frac{1}{3}x^3 ¦ k\pi ☒ 2k\pi
\frac{\pi}{4} + k\pi ☒ \frac{\pi}{4} + 2n\pi ¦ \text{Alice and Bob} ☒ \text{Alice and Carol} ¦ A ☒ A(2,3)
B(2,3) ☒ A(2,3) ¦ y = 2x + 1 ✗ g(x) = 2x+1 ¦ 20 ✗ 20!? ✗ 20 = ? ☒ \text{June 20} ✗ It is 20% of 90. ¦ 8 ☒ 5+3=?
2 ☒ \text{loss of \textdollar 2 or \textdollar 3} ¦ -1000 ☒ \text{loss of \textdollar 1000} ¦ 90 ✗ It is 20% of 90.
✗ It is 20% off 90. ¦ 20% ✗ It is 20% of 90. ✗ It is 20% off 90. ¦ 250 ✗ 68% of 250.00 is 170 ¦ 18 ✗ It is 20% off 90.
""",
    "notations of programs": r"""
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ✓ Matrix([[1, 2], [3, 4]]) ☑ [1, 2; 3, 4] ¦ (1,2) ☑ (1, 2)^T ¦ 3+4i ☑ 3+4j
(-4-2j) ☑ -4 - 2i ¦ x=1,y=2 ✓ {'x': 1, 'y': 2} ¦ 1000000 ✓ 1_000_000 ¦ 1/3 ✓ 0.(3) ¦ June 5 ✓ 5th of June
(1,2),(3,4) ✓ x=1,y=2 or x=3,y=4 ✓ [(1,2),(3,4)] ¦ {1,2} ☑ \{2,1,2\} ¦ x > 3 ✓ {x | x > 3} ¦ 10 ☑ 5C2 ¦ |x| ☑ \abs{x}
\emptyset ✓ the empty set ¦ \infty ☑ Infinity
""",
    "a sentence in a box": r"""
9 ☑ The smallest positive integer \(N\) with this property is \(9\). ☑ We get 9. ¦ B ☑ Option B ¦ 42 ☑ 答案：42
""",
    "nearly the same as one of these notations": r"""
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ✗ Matrix([[1, 3], [2, 4]]) ¦ (1,2) ☒ (2,1)^T ✗ x=1,y=2 or x=3,y=4 ✗ {1,2}
3+4i ☒ 3+4k ¦ 4i ☒ 4j ¦ x=1,y=2 ✗ {'x': 2, 'y': 1} ¦ 1000 ✗ 1_00 ¦ 5 ✗ 5th of June ¦ 1,1,2 ☒ \{1,2\} ¦ 3 ✗ {x | x > 3}
\infty ☒ negative infinity ¦ 2 mW ✗ 2 MW ¦ 2 kPa ✗ 2 MPa ¦ 2 ✗ 2 MN ✗ 2 B ✗ x_2_ ¦ 5 seconds ✗ five meters ¦ 120 ✗ 5?
41 ✗ <b>41</b>, <b>42</b> ¦ 9 ☒ The statement discusses \(9\) possibilities. ¦ 42 ☒ Is it 42? ☒ The answer is 41 or 42.
☒ The answer is not 42. ☒ Option B is 42 and option C is 43 ☒ 答案是41，不是42 ¦ B ☒ Option B or C
""",
    "one choice is its letter and what it stands for": r"""
A ☑ (A) 5 ☑ (A) B ¦ 5 ☑ (A) 5 ¦ (A) 5 ☑ 5 ☑ A ¦ C ☑ (C) P(A) ¦ B ☑ B. 12 ☑ \textbf{(B)}\ \text{triangle } ABC
D ☑ (D) P(A)\cdot P(B)
""",
    "an equation that is still to be solved": r"""
x=3 ☒ 2x+1=7 ☒ x-3=0 ☒ 2x=6 ☒ 0=x-3 ☒ \frac{x}{3}=1 ☒ x+x=6 ☒ 3-x=0 ☒ 4x-12=0 ☒ x+0=3 ¦ x>3 ☒ 2x+1>7 ☒ x-3>0 ☒ 2x>6
☒ 6<2x ☒ 0<x-3 ¦ x \le 2 ☒ 2x \le 4 ☒ x-2 \le 0 ¦ 1<x<3 ☒ 2<x+1<4 ☒ 2<2x<6 ☒ 0<x-1<2 ¦ x \neq 2 ☒ 2x \neq 4 ☒ x-2 \neq 0
x=1,y=2 ☒ x+y=3,x-y=-1 ☒ 2x=2,y=2 ¦ x=1 \text{ or } x=2 ☒ (x-1)(x-2)=0 ☒ x^2-3x+2=0 ☒ 2x=2 \text{ or } 2x=4
\theta = \frac{\pi}{6} ☒ 2\theta = \frac{\pi}{3}
""",
    "a solution in every form": r"""
x=3 ☑ 3=x ☑ x=\frac{6}{2} ☑ 3 ¦ x>3 ☑ 3<x ☑ (3,\infty) ☑ x\in(3,\infty) ¦ y=2x+1 ☑ 2x-y+1=0 ¦ 2x+y=1 ☑ y=1-2x
1<x<3 ☑ (1,3) ☑ 3>x>1 ¦ 5 ☑ |AB| = 5 ☑ |P(2)| = 5
""",
    "a difference counts however small it is and wherever it hides": r"""
x ☒ x+\sin(1\pi x) ☒ x+\sin(2\pi x) ☒ x+\sin(12\pi x) ☒ x+\sin(8192\pi x) ☒ x+\sin(1048576\pi x) ☒ x+\sin(41287680\pi x)
☒ x+10^{-51} ☒ x+10^{-200} ¦ \sqrt2 ☒ \sqrt2+10^{-7} ☒ \sqrt2+10^{-30} ☒ \sqrt2+10^{-51} ☒ \sqrt2+10^{-52}
☒ \sqrt2+10^{-60} ☒ \sqrt2+10^{-121} ☒ \sqrt2+10^{-400} ☒ \sqrt2+10^{-5000} ☒ \sqrt2\cdot(1+2^{-300}) ☒ \sqrt2+1/400!
\pi ☒ \pi+(\sqrt{10^{200}+1}-10^{100}) ¦ \sqrt2\cdot10^{-300} ☒ \sqrt3\cdot10^{-300}
x^2 ☒ x^2+\sin(\pi x)^{2}\cdot10^{-60} ¦ 3x-y+13=0 ☒ 3x-y+13+10^{-60}=0 ¦ 0 ☒ 10^{-99}\sqrt2
""",
    "equal numbers of every size": r"""
\sqrt2 ☑ (10^{50}+\sqrt2)-10^{50} ¦ \sqrt2+10^{-51} ☑ 10^{-51}+\sqrt2 ¦ 1 ☑ \sin^2 1+\cos^2 1
10^{-300}\sqrt8 ☑ 2\sqrt2\cdot10^{-300} ¦ \sqrt{5+2\sqrt6} ☑ \sqrt2+\sqrt3 ¦ 0 ☑ \sqrt{5+2\sqrt6}-\sqrt2-\sqrt3
""",
    "what is said around an answer does not hide it": r"""
\begin{pmatrix}1&2\\3&4\end{pmatrix} ☑ \begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}
\begin{pmatrix}1\\2\\3\end{pmatrix} ☑ \begin{pmatrix}1\\[0.5em]2\\ [1ex]3\end{pmatrix} ¦ 5 ✓ never zero so \boxed{5}
✓ It is not even, hence 5. ✓ not six but 5 ✓ It cannot be six so it is 5 ✓ It isn't six, therefore 5.
✓ not divisible by three thus \boxed{5} ☑ |AB|=5 ☑ \left|\vec{a}\right|=5 ☑ \lVert v\rVert = 5 ☑ |z| = 5 ☑ |f(2)|=5
Friday ✓ not Tuesday but \boxed{Friday} ✓ The answer is not Tuesday but Friday.
D ✓ The correct answer is (D) $\frac37$. ✓ The answer is (D) 5 apples ✓ Answer: D) $x+1$ ✓ The answer is D. 12
\frac37 ✓ The correct answer is (D) $\frac37$. ¦ Yes ✓ Yes, since the angles sum to 180 degrees. ✓ Yes because 2+2=4
✓ yes - as 7 is prime ¦ No ✓ No, because 15 = 3*5. ¦ x+c ☑ x+c \text{ where } c \text{ is a constant}
☑ x+c, c \in \mathbb{R} ☑ x+c\text{ for some constant } c ¦ 2^{n-1} ☑ 2^{n-1}, n\ge1 ☑ 2^{n-1}, n \geq 1
☑ 2^{n-1} \text{ for } n \ge 1 ☑ 2^{n-1}\ (n > 0) ☑ 2^{n-1}, n=1,2,3,\ldots ☑ 2^{n-1}, n\in\mathbb{N}
\frac{1}{x} ☑ \frac{1}{x}, x \neq 0 ¦ |x-1|+|x+2| ☑ |x+2|+|x-1| ¦ |x|y ☑ y\left|x\right| ¦ \frac{|x|}{x} ☑ |x|/x
\sum_{k=1}^n k(k+1) ☑ \sum_{k=1}^n (k+1)k ¦ \sum_{i=1}^{n} a_i b_i ☑ \sum_{i=1}^{n} b_i a_i
\sum_{k=1}^n \frac{x}{k+2} ☑ \sum_{j=1}^n \frac{x}{2+j} ¦ \prod_{k=1}^n (k+x) ☑ \prod_{k=1}^n (x+k)
x\sum_{k=1}^{n} k^2 ☑ \sum_{k=1}^{n} k^2 x ¦ \sum_{k=1}^{n} k ☑ \frac{n(n+1)}{2}
\frac{n(n+1)(n+2)}{3} ☑ \sum_{k=1}^n k(k+1) ¦ 55 ☑ \sum_{k=1}^{10} k ¦ 2.75 ☑ 2{,}75 ☑ 2{,}7500
0.5 ✓ The value is $0{,}5$.
""",
    "what is said around an answer counts where it changes it": r"""
5 ✗ never \boxed{5} ✗ It is 6 but not \boxed{5} ☒ |x| = 5 ¦ 180 ✗ Yes, since the angles sum to 180 degrees.
x=5 ☒ x=5 or x=6 ¦ x<5 ☒ x<5, x>1 ¦ \frac{1}{x}, x>0 ☒ \frac{1}{x}, x<0 ¦ 0 ☒ f(x) - x = 0
A ✗ The correct answer is (D) $A$. ¦ \sum_{k=1}^n k(k+1) ☒ \sum_{k=1}^n k(k+2)
\frac{n(n+1)}{2} ☒ \sum_{k=1}^n (k+(k-2)(k-3)(k-4)(k-5)) ¦ 56 ☒ \sum_{k=1}^{10} k
\sum_{k=1}^n k^n ☒ \sum_{k=1}^{n+1} k^n ¦ 2750 ☒ 2{,}75 ¦ 2.75 ☒ 2{,}750
""",
    "words that may be passed over": r"""
42 ✓ The answer is 42 apples in all. ☑ 42\text{ apples} ✓ <answer>Every day she sells 42 of them.</answer>
✓ Answer: the sum of the first 10 terms is 42. ✓ <answer>It is 42, not 41.</answer> ✓ The answer is $42$ for every $n$.
☑ \textbf{(A)}\ 42 ✓ <answer>The number that is divisible by 7 is 42</answer>
✓ The answer is B. 42. A quick check: C is too small. ¦ A ☑ \textbf{(A)}\ 42
D ✓ The answer is for sure D, it can't be A or B ✓ <answer>The number of days is (D) 42</answer> ✓ Perhaps D is correct.
✓ I think that D is correct. ✓ So maybe D is correct. ✓ Probably, D is correct.
B ✓ It's not A because it doesn't fit, therefore I think it's B ✓ The answer is B. 42. C is too small. ¦ C ✓ Choice: C
✓ __Answer:__ C ✓ the option is (c) ¦ 7 ✓ The final answer is #### 7.
""",
    "a comma is a point where a list would be odd": r"""
2.75 ☑ 2{,}75 ☑ 2,75 ✓ The answer is 2,75. ☒ 2,76 ¦ 275 ☒ 2,75 ¦ 1000.99 ☑ 1000,99 ¦ 0.111 ☑ 0,111 ¦ 1.05 ☑ 1,05
1000 ☑ 1,000 ¦ 1 ☒ 1,000 ¦ (3,5) ☑ 3,5 ¦ 3, 5 ☑ 3,5 ¦ 3.5 ☑ 3,5 ¦ 35 ☒ 3,5 ¦ 7/2 ☒ 3,5 ¦ 2.5 ☒ 2,5,1 ¦ 1234.5 ☒ 1.234,5
""",
    "a mixed number is a number before a fraction and nothing else": r"""
3\binom{4}{2} ☑ 18 ☒ 9 ¦ 18 ☑ 3\binom{4}{2} ¦ 9 ☒ 3\binom{4}{2} ¦ 63 \binom{64}{2}+1 ☑ 127009 ☒ 2080
127009 ☑ 63 \binom{64}{2}+1 ¦ 2080 ☒ 63 \binom{64}{2}+1 ¦ 2\left(\frac{1}{2}\right) ☑ 1 ☒ 5/2
1 ☑ 2\left(\frac{1}{2}\right) ¦ 5/2 ☒ 2\left(\frac{1}{2}\right) ¦ (3)\frac{1}{2} ☑ 3/2 ☒ 7/2 ¦ 3/2 ☑ (3)\frac{1}{2}
☒ 3\frac{1}{2} ¦ 7/2 ☑ 3\frac{1}{2} ☒ (3)\frac{1}{2} ¦ 3\frac{1}{2} ☑ 7/2 ☒ 3/2
""",
}


#: Not computed, since it may grow without bound: only what is written alike is right for it.
UNCHECKED = r"\sum_{i=1}^{n} a_i b_i"


@pytest.mark.parametrize("title", TABLES)
def test_each_answer_is_right_or_wrong_as_it_should_be(title: str) -> None:
    told = cases(TABLES[title])
    assert [(one, answer) for one, answer, right in told if verdict(one, answer) != ("wrong", "right")[right]] == []
    assert all(gold("", "", one) for one, _, _ in told if one != UNCHECKED)
